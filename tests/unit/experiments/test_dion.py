"""Dion as a reducer of two gloo processes, against its equations written plainly."""

import pytest
import torch
from torch import Tensor, distributed, nn

from limner.distributed.gradient_reducers import Replicas, buckets
from limner.distributed.overlapped_reducer import OverlappedReducer
from limner.distributed.powersgd import EPS, PowerSGDConfig
from limner.experiments.dion import Dion
from ranks import on_ranks

SHAPES, RANK, STEPS = [(12, 20), (20, 12)], 3, 4


def gradient(shape: tuple[int, int], step: int, rank: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + rank)) * 0.01


def updates() -> list[tuple[Tensor, list[Tensor], Tensor]]:
    """For each shape Q at the start, the updates, and the mean momentum at the end."""
    results = []
    for rows, columns in SHAPES:
        model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(columns, rows, bias=False)])})
        reducer = Dion(PowerSGDConfig(rank=RANK, quantize=False))
        reduction = OverlappedReducer(reducer, buckets(model), Replicas(distributed.group.WORLD))
        (matrix,), weight, returned = reducer.matrices(), model["list"][0].weight, []
        start = matrix.q0.clone()
        for step in range(STEPS):
            weight.grad = None
            (weight * gradient((rows, columns), step, distributed.get_rank())).sum().backward()
            reduction.complete()
            returned += [p.grad.clone() for part in reduction.parts([weight]) for p in part]
        results.append((start, returned, reduction.mean_error_buffers()["list.0.weight"]))
    return results


@pytest.fixture(scope="module")
def ranks() -> list[list[tuple[Tensor, list[Tensor], Tensor]]]:
    return on_ranks(2, updates)


@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_updates_are_those_of_the_equations(ranks, case):
    shape = SHAPES[case]
    turn = (lambda x: x.T) if shape[0] > shape[1] else (lambda x: x)
    q, momentum = ranks[0][case][0], [torch.zeros(min(shape), max(shape)) for _ in range(2)]
    for step in range(STEPS):
        b = [m + turn(gradient(shape, step, rank)) for rank, m in enumerate(momentum)]
        p = sum(x @ q for x in b) / 2
        p = torch.linalg.qr(p + EPS * p.norm(dim=0).max() * torch.eye(min(shape), RANK)).Q
        r = sum(x.T @ p for x in b) / 2
        momentum = [x - 0.05 * p @ r.T for x in b]
        q = r / r.norm(dim=0)
        for rank in ranks:
            should = turn(p @ q.T) * max(1, shape[0] / shape[1]) ** 0.5
            torch.testing.assert_close(rank[case][1][step], should, atol=1e-5, rtol=0)
    for rank in ranks:
        torch.testing.assert_close(turn(rank[case][2]), sum(momentum) / 2, atol=1e-6, rtol=0)
