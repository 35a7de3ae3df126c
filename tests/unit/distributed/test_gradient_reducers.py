"""Reducers in gloo processes: against one process on the whole batch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from limner.distributed.gradient_reducers import Bf16Reducer, Fp32Reducer, buckets
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded, Zero2
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import full_tensor
from limner.training.parallel import Parallel, SingleProcess
from limner.training.train_module import Trainable
from ranks import left_out, on_ranks

PRIOR = TransformerConfig(
    text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=2, heads=2, kernel=3
)  # fmt: skip


BATCH = 8


def batch(step: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """A share of the batch of a step."""
    g = torch.Generator().manual_seed(step)
    text, image = torch.randint(0, 20, (BATCH, 8), generator=g), torch.randint(0, 8, (BATCH, 9), generator=g)
    return {name: x.chunk(world)[rank] for name, x in {"text": text, "image": image}.items()}


def gradients(
    parallel: Parallel, steps: int, accumulate: int = 1, kept: Mapping[str, Tensor] | None = None, first: int = 0
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The mean gradients of each step by parameter, and what the strategy keeps at the end; it begins with `kept`."""
    torch.manual_seed(parallel.rank)  # the first process's weights are everyone's
    model = PRIOR.build()
    compute = parallel.prepare(Trainable(model, Autoregressive()), torch.device("cpu"), torch.float32)
    parallel.reduction.load_state_dict(kept or {})
    found = []
    for step in range(first, first + steps):
        for p in model.parameters():
            p.grad = None
        share = batch(step, parallel.rank, parallel.world_size)
        for i in range(accumulate):
            with parallel._microbatch(last=i == accumulate - 1):
                part = {name: x.chunk(accumulate)[i] for name, x in share.items()}
                (compute(part, step, torch.Generator())[0] / accumulate).backward()
        parallel.reduce(model.parameters())
        names = {p: name for name, p in model.named_parameters()}
        parts = parallel.reduction.parts(model.parameters())
        found.append({names[p]: full_tensor(p.grad).clone() for part in parts for p in part})
    kept = left_out(parallel)
    parallel.assert_replicas_equal(model.parameters())
    return found, kept


def strategy(kind: str) -> Parallel:
    config = PowerSGDConfig(rank=8, quantize="narrow" in kind)
    make = {"plain": Fp32Reducer, "bf16": Bf16Reducer, "powersgd": partial(PowerSGD, config)}[kind.split()[1]]
    if kind.startswith("replicated"):
        return Replicated(make)
    return (Zero2 if kind.startswith("zero2") else Sharded)(2, make)


def all_gradients(kinds: list[str], steps: int) -> dict[str, Any]:
    return {kind: gradients(strategy(kind), steps, 2 if "accumulated" in kind else 1) for kind in kinds}


KINDS = [
    "replicated plain", "replicated bf16", "replicated powersgd", "replicated powersgd narrow",
    "replicated powersgd accumulated", "sharded plain", "sharded bf16", "sharded powersgd", "sharded powersgd narrow",
    "sharded powersgd accumulated", "zero2 plain", "zero2 powersgd accumulated",
]  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return on_ranks(4, all_gradients, KINDS, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sent_and_kept_parts_add_up_to_the_gradient(measured, kind):
    """The sum over all steps is exact; uncompressed parameters get the mean gradient itself."""
    alone, _ = gradients(SingleProcess(), 3)
    tolerance = 1e-2 if "bf16" in kind else 4e-3 if "narrow" in kind else 2e-6
    for rank in measured:
        steps, kept = rank[kind]
        assert bool(kept) == ("powersgd" in kind)
        for name in alone[0]:
            given = sum(step[name] for step in steps) + kept.get(name, 0)
            should = sum(step[name] for step in alone)
            assert (given - should).norm() <= tolerance * sum(step[name].norm() for step in alone), name
            if name in kept:
                assert (steps[0][name] - alone[0][name]).norm() > 0.05 * alone[0][name].norm()
        assert all(torch.equal(steps[-1][name], measured[0][kind][0][-1][name]) for name in steps[-1])
    if "powersgd" in kind:
        compressed = [name for name in alone[0] if name in measured[0][kind][1]]
        assert len(compressed) == 8 and all(name.startswith("blocks.") for name in compressed)


def going_on(kinds: list[str], first: int, steps: int, kept: dict[str, Any], replicas: int) -> dict[str, Any]:
    make = partial(PowerSGD, PowerSGDConfig(rank=8, quantize=False))
    makers = {"replicated": lambda: Replicated(make), "sharded": lambda: Sharded(replicas, make)}
    return {kind: gradients(makers[kind](), steps, kept=kept.get(kind), first=first) for kind in kinds}


@pytest.fixture(scope="module")
def stopped() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return gradients and buffers of 4 processes after 5 steps, in 4 replicas and in 2, and those after 3 steps."""
    both = ["replicated", "sharded"]
    return on_ranks(4, going_on, both, 0, 5, {}, 2)[0], on_ranks(4, going_on, both, 0, 3, {}, 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [("replicated", 2), ("replicated", 1), ("sharded", 2)])
def test_error_buffers_resume_with_any_number_of_replicas(stopped, kind, ranks):
    """Their mean is all that counts."""
    should, before = stopped
    for result in on_ranks(ranks, going_on, [kind], 3, 2, {kind: before[kind][1]}, 1):
        for ours, theirs in zip(result[kind][0], should[kind][0][3:], strict=True):
            for name, gradient in theirs.items():
                assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


class Two(nn.Module):
    """Two blocks and something outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 12) for _ in range(2)])
        self.outside = nn.Linear(12, 2)


def test_a_bucket_is_a_resblock_an_entry_of_a_list_or_a_child_of_the_model():
    found = buckets(PRIOR.build())
    blocks = [f"blocks.{i}.{branch}" for i in range(2) for branch in ("attention", "mlp")]
    assert list(found) == ["embed", *blocks, "head"]
    assert [name for name, bucket in found.items() if bucket.in_block] == blocks
    found = buckets(Two())
    assert {name: list(bucket.parameters) for name, bucket in found.items()} == {
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"], "blocks.1": ["blocks.1.weight", "blocks.1.bias"],
        "outside": ["outside.weight", "outside.bias"],
    }  # fmt: skip
    bare = nn.Linear(2, 2)
    assert list(buckets(bare)) == [""] and list(buckets(bare)[""].parameters) == ["weight", "bias"]
