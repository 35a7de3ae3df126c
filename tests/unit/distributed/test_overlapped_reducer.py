"""Reduction during the backward pass: its order, and the contrastive loss with distractors, in micro-batches: gradients
of several processes are those of one, and where an objective calls a block twice, an error says so."""

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from limner.distributed.gradient_reducers import Fp32Reducer, PendingWork, Replicas, buckets
from limner.distributed.overlapped_reducer import OverlappedReducer
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded, Zero2
from limner.errors import UserError
from limner.models.contrastive import CLIPConfig
from limner.numerics.precision import Fp32
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.optim.dtensor import full_tensor
from limner.training.config import TrainConfig
from limner.training.hooks import Hook
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")


PARTS, BATCH = 2, 8


# Without `ln_pre`, which would enlarge differences in the order of sums: initial positions are near zero.
MODEL = CLIPConfig(
    text_vocab=20, text_len=6, size=8, patch=4, width=16, depth=2, heads=2, embedding=8, qk_norm=True, ln_pre=False
)  # fmt: skip


WAYS = {
    "replicated": (2, Replicated),
    "replicated, reduced": (2, lambda: Replicated(Fp32Reducer)),
    "sharded": (2, Sharded),
    "sharded, 2 replicas": (4, lambda: Sharded(2)),
    "zero2": (2, Zero2),
    "zero2, 2 replicas": (4, lambda: Zero2(2)),
}


def share(rank: int, world: int) -> dict[str, Tensor]:
    """A process's rows, so that a micro-batch of all processes is one of a process alone."""
    g = torch.Generator().manual_seed(0)
    captions = torch.randint(0, 20, (BATCH, 1 + 3, 6), generator=g)
    captions[0, 1:3] = -1  # padding only
    captions[1, 0, 4:] = -1
    pixels = torch.randint(0, 256, (BATCH, 3, 8, 8), generator=g, dtype=torch.uint8)
    batch = {"text": captions[:, 0], "distractors": captions[:, 1:], "pixels": pixels}
    return {name: x.unflatten(0, (PARTS, world, -1))[:, rank].flatten(0, 1) for name, x in batch.items()}


class Twice(HardNegativeLoss):
    """Encodes captions a second time."""

    def __call__(self, model: Any, batch: Any, *others: Any) -> Any:
        loss, found = super().__call__(model, batch, *others)
        return loss + model.encode_text(batch["text"]).square().sum(), found

    gathered = None  # type: ignore[assignment]


class Kept(Hook):
    """The gradients as the update gets them."""

    gradients: dict[str, Tensor]

    def after_backward(self, run: TrainState) -> None:
        self.gradients = {
            name: full_tensor(p.grad).clone() for name, p in run.model.named_parameters() if p.grad is not None
        }


def gradients(parallel: Parallel) -> dict[str, Tensor]:
    """Run two updates."""
    torch.manual_seed(0)
    config = TrainConfig(steps=2, batch_size=BATCH, accumulate=PARTS, precision=Fp32())
    run = TrainState(MODEL.build(), HardNegativeLoss(), config, parallel=parallel)
    found = {}
    for step in range(2):
        update(run, share(parallel.rank, parallel.world_size), [kept := Kept()])
        found |= {f"{step} {name}": grad for name, grad in kept.gradients.items()}
    return found


def of_all(ranks: int) -> dict[str, dict[str, Tensor]]:
    return {way: gradients(make()) for way, (world, make) in WAYS.items() if world == ranks}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Tensor]]:
    return {way: found for ranks in (2, 4) for way, found in on_ranks(ranks, of_all, ranks)[-1].items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(measured, way):
    alone = gradients(SingleProcess())
    assert measured[way].keys() == alone.keys()
    for name, gradient in measured[way].items():
        torch.testing.assert_close(gradient, alone[name], rtol=1e-5, atol=1e-5, msg=name)


def report(way: str) -> str:
    config = TrainConfig(steps=1, batch_size=BATCH, accumulate=PARTS, precision=Fp32())
    parallel = WAYS[way][1]()
    run = TrainState(MODEL.build(), Twice(), config, parallel=parallel)
    with pytest.raises(UserError) as error:
        update(run, share(parallel.rank, parallel.world_size))
    return str(error.value)


@pytest.mark.parametrize("way", ["sharded", "sharded, 2 replicas"])
def test_a_block_called_twice_raises(way):
    for says in on_ranks(WAYS[way][0], report, way):
        assert "twice for one loss" in says and "call it once" in says


class Noting(Fp32Reducer):
    """A reducer that records its calls, and when its communication ends."""

    def __init__(self, report: list[str]) -> None:
        self.report = report

    def reduce(self, bucket: str) -> PendingWork:
        self.report.append(f"{bucket} sends")
        yield from super().reduce(bucket)
        self.report.append(f"{bucket} is through")


def noted() -> list[str]:
    report: list[str] = []
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    for i, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, i=i: report.append(f"backward of {i}"))
    reduction = OverlappedReducer(Noting(report), buckets(model), Replicas(distributed.group.WORLD))
    model(torch.ones(1, 3, requires_grad=True)).sum().backward()
    reduction.complete()
    return report


def test_two_backward_passes_run_before_a_communication_is_waited_for():
    for report in on_ranks(2, noted):
        order = [one for one in report if not one.startswith("backward")]
        assert order == [
            "3 sends", "2 sends", "1 sends", "3 is through", "0 sends", "2 is through", "1 is through", "0 is through",
        ]  # fmt: skip
        assert report.index("backward of 2") < report.index("3 is through")
