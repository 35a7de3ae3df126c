"""Weights in shards: when and in which format they are gathered, also for an evaluation, and that losses and gradients
are those of one process."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from limner.distributed.sharded import Sharded, Zero2
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Bf16, Fp32, Precision
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import full_tensor, is_dtensor
from limner.optim.optimizers import AdamWConfig
from limner.planner.memory_tracker import MemoryTracker
from limner.training.config import TrainConfig
from limner.training.hooks import Hook
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks

PRIOR = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=5, heads=2)
SHALLOW, SMALL = replace(PRIOR, depth=3), replace(PRIOR, depth=2, kernel=3)


pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")


def begun(kind: type[Sharded]) -> tuple[list[int], int]:
    """Count the groups sent when each block begins to compute, and after the update."""
    torch.manual_seed(0)
    config = TrainConfig(steps=1, batch_size=4, precision=Fp32(), optimizer=AdamWConfig(lr=1e-3))
    run = TrainState(PRIOR.build(), Autoregressive(), config, parallel=kind())
    counts: list[int] = []
    blocks: Any = run.model.blocks
    with MemoryTracker() as watch:
        for block in blocks:
            block.attention.norm.register_forward_pre_hook(lambda *_: counts.append(watch.calls["send"]))
        update(run, {"text": torch.randint(0, 20, (2, 8)), "image": torch.randint(0, 8, (2, 9))})
    return counts, watch.calls["send"]


@pytest.mark.parametrize(("kind", "again"), [(Sharded, PRIOR.depth - 1), (Zero2, 0)])
def test_two_blocks_are_asked_for_ahead_and_the_last_one_once(kind: type[Sharded], again: int) -> None:
    for counts, total in on_ranks(2, begun, kind):
        groups = 1 + PRIOR.depth  # what is outside the blocks comes first
        assert counts == [min(1 + i + 1 + 2, groups) for i in range(PRIOR.depth)]
        assert total == groups + again + groups  # whose gradients come last


COUNTER = Path("/proc/self/io")


WIDE = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(4, 4), width=64, depth=3, heads=2)


def written() -> int:
    """Bytes that this process has written into files and sockets."""
    return int(next(line for line in COUNTER.read_text().splitlines() if line.startswith("wchar:")).split()[1])


def sent(kind: type[Sharded]) -> tuple[int, int, bool]:
    """Bytes of the second update, bytes of the blocks' weights, and whether moments are in shards."""
    torch.manual_seed(0)
    config = TrainConfig(steps=2, batch_size=4, precision=Fp32(), optimizer=AdamWConfig(lr=1e-3))
    run = TrainState(WIDE.build(), Autoregressive(), config, parallel=kind())
    blocks = sum(p.numel() * p.element_size() for p in run.model.blocks.parameters())
    batch = {"text": torch.randint(0, 20, (2, 8)), "image": torch.randint(0, 8, (2, 16))}
    update(run, batch)
    distributed.barrier()
    before = written()
    update(run, batch)
    distributed.barrier()
    moments = [state["exp_avg"] for optimizer in run.optimizers for state in optimizer.state.values()]
    return written() - before, blocks, all(map(is_dtensor, moments))


@pytest.mark.skipif(not COUNTER.exists(), reason="bytes are counted by Linux")
def test_weights_of_blocks_are_gathered_once_and_moments_stay_in_shards():
    for (twice, blocks, _), (once, _, shard_on_registration) in zip(
        on_ranks(2, sent, Sharded), on_ranks(2, sent, Zero2), strict=True
    ):
        assert shard_on_registration
        # Each of two processes sends its half of what all gather. The last block is gathered once by both.
        assert twice - once == pytest.approx(blocks / 2 * (WIDE.depth - 1) / WIDE.depth, rel=0.1)


KINDS: dict[str, Any] = {"sharded": Sharded, "zero2": Zero2}


def evaluating(parallel: Parallel, evaluates: bool) -> tuple[list[float], list[float], int]:
    """Losses, evaluation metrics of averaged weights, and the largest number of blocks with full weights."""
    torch.manual_seed(0)
    config = TrainConfig(steps=3, batch_size=8, precision=Bf16(), optimizer=AdamWConfig(lr=0.01), ema_decay=0.5)
    run = TrainState(SHALLOW.build(), Autoregressive(), config, parallel=parallel)
    g = torch.Generator().manual_seed(0)
    batch = {"text": torch.randint(0, 20, (8, 8), generator=g), "image": torch.randint(0, 8, (8, 9), generator=g)}
    share = {name: x.chunk(parallel.world_size)[parallel.rank] for name, x in batch.items()}
    whole, losses, metrics = [0], [], []

    blocks: Any = run.model.blocks

    def look(*_: Any) -> None:
        whole.append(sum(not all(map(is_dtensor, block.parameters())) for block in blocks))

    def evaluate(model: Any, step: int) -> Mapping[str, float]:
        handles = [block.register_forward_hook(look, prepend=True) for block in blocks]
        loss, _ = Autoregressive()(model, batch, step, torch.Generator())
        for handle in handles:
            handle.remove()
        return {"loss": float(loss)}

    for _ in range(3):
        update(run, share)
        losses.append(run.loss)
        if evaluates:
            metrics.append(run.evaluate(evaluate)["loss"])
    return losses, metrics, max(whole)


def evaluated() -> dict[str, Any]:
    return {way: (evaluating(make(), True), evaluating(make(), False)) for way, make in KINDS.items()}


@pytest.fixture(scope="module")
def evaluations() -> list[dict[str, Any]]:
    return on_ranks(2, evaluated)


@pytest.mark.parametrize("way", KINDS)
def test_blocks_are_gathered_one_by_one_and_training_is_the_same(evaluations, way):
    expected = evaluating(SingleProcess(), True)
    for rank in evaluations:
        (losses, metrics, whole), (without, _, _) = rank[way]
        assert losses == without
        assert metrics == pytest.approx(expected[1], rel=1e-3) and len(set(metrics)) == 3
        if way == "sharded":
            assert whole == 1


class Gradients(Hook):
    def after_backward(self, run: TrainState) -> None:
        self.found = {
            name: full_tensor(p.grad).clone() for name, p in run.model.named_parameters() if p.grad is not None
        }


def learn(strategy: Parallel, precision: Precision, checkpointed: bool = False, accumulate: int = 1) -> dict[str, Any]:
    """Two updates: losses, the last gradients, formats in which layers saw their weights, bytes sent in the second.
    With a small eps Adam would move weights by the signs of gradients that are all rounding."""
    torch.manual_seed(0)
    config = TrainConfig(
        steps=2, batch_size=8, accumulate=accumulate, precision=precision, optimizer=AdamWConfig(lr=1e-3, eps=1e-3),
        checkpoint_activations=checkpointed, clip_norm=1.0,
    )  # fmt: skip
    run = TrainState(SMALL.build(), Autoregressive(), config, parallel=strategy)
    seen: dict[str, set[torch.dtype]] = {}
    for name, module in run.model.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_pre_hook(lambda m, _, name=name: seen.setdefault(name, set()).add(m.weight.dtype))
    generator, gradients, losses = torch.Generator().manual_seed(0), Gradients(), []
    with MemoryTracker() as watch:
        for _ in range(2):
            text = torch.randint(0, 20, (8, 8), generator=generator).chunk(strategy.world_size)[strategy.rank]
            image = torch.randint(0, 8, (8, 9), generator=generator).chunk(strategy.world_size)[strategy.rank]
            watch.reset()
            update(run, {"text": text, "image": image}, [gradients])
            losses.append(run.loss)
    dtypes = {name: {p.dtype, p.grad.dtype} for name, p in run.model.named_parameters() if p.grad is not None}
    return {"loss": losses, "grads": gradients.found, "seen": seen, "sent": dict(watch.sent), "dtypes": dtypes}


def all_of(precision: Precision) -> list[dict[str, Any]]:
    return [learn(Sharded(), precision), learn(Sharded(), precision, checkpointed=True, accumulate=2)]


@pytest.fixture(scope="module")
def halves() -> list[list[dict[str, Any]]]:
    """Records of two processes by precision: without and with checkpointing and two micro-batches."""
    return [on_ranks(2, all_of, precision)[0] for precision in (Bf16(), Fp32())]


def test_matrices_of_blocks_are_gathered_in_16_bits_and_all_else_in_32(halves):
    (sixteen, _), (full, _) = halves
    for name, dtypes in sixteen["seen"].items():
        product = name.startswith("blocks.") and "norm" not in name
        assert dtypes == {torch.bfloat16 if product else torch.float32}, name
    assert all(dtypes == {torch.float32} for dtypes in full["seen"].values())
    for found in (sixteen, full):
        assert all(dtypes == {torch.float32} for dtypes in found["dtypes"].values())
    # Half of each number that is gathered or scattered goes to the other process: weights for the forward pass and, but
    # for the last block's, for the backward pass; gradients, in fp32, once.
    everything = sum(p.numel() for p in SMALL.build().parameters() if p.ndim)
    block = SMALL.build().blocks[0]
    again = sum(p.numel() for p in block.parameters() if p.ndim) * (SMALL.depth - 1)
    bytes_sent = (everything + again + everything) * 4 // 2
    assert bytes_sent <= full["sent"]["send"] <= bytes_sent * 1.01  # with padding
    # Two bytes less for each number of a linear layer, as often as it is gathered.
    linear = sum(p.numel() for m in block.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    assert full["sent"]["send"] - sixteen["sent"]["send"] == linear * (2 * SMALL.depth - 1)
    for found in (sixteen, full):
        assert not {"all-to-all", "reduce-scatter"} & set(found["sent"])


@pytest.mark.parametrize("way", [0, 1])
def test_losses_and_gradients_are_those_of_one_process(halves, way):
    found = halves[0][way]
    alone = learn(SingleProcess(), Bf16())
    assert found["loss"] == pytest.approx(alone["loss"], rel=2e-4)
    for name, gradient in alone["grads"].items():
        assert (found["grads"][name] - gradient).norm() <= 1e-2 * gradient.norm() + 1e-6, name
