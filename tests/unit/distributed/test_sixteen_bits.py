"""Weights in shards, products in bf16: what is gathered in which format, and that it changes nothing."""

from typing import Any

import pytest
import torch
from torch import nn

from limner.distributed.sharded import Sharded
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Bf16, Fp32, Precision
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import full_tensor
from limner.optim.optimizers import AdamWConfig
from limner.planner.trackers import CollectiveCounter
from limner.training.config import TrainConfig
from limner.training.hooks import Hook
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks

PRIOR = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=2, heads=2, kernel=3)


class Gradients(Hook):
    def after_backward(self, run: TrainState) -> None:
        self.found = {
            name: full_tensor(p.grad).clone() for name, p in run.model.named_parameters() if p.grad is not None
        }


def learn(strategy: Parallel, precision: Precision, checkpointed: bool = False, accumulate: int = 1) -> dict[str, Any]:
    """Two updates: losses, the last gradients, formats in which layers saw their weights, bytes sent in the second."""
    torch.manual_seed(0)
    config = TrainConfig(
        steps=2, batch_size=8, accumulate=accumulate, precision=precision, optimizer=AdamWConfig(lr=1e-3),
        checkpoint_activations=checkpointed, clip_norm=1.0,
    )  # fmt: skip
    run = TrainState(PRIOR.build(), Autoregressive(), config, parallel=strategy)
    seen: dict[str, set[torch.dtype]] = {}
    for name, module in run.model.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_pre_hook(lambda m, _, name=name: seen.setdefault(name, set()).add(m.weight.dtype))
    generator, gradients, losses = torch.Generator().manual_seed(0), Gradients(), []
    for _ in range(2):
        text = torch.randint(0, 20, (8, 8), generator=generator).chunk(strategy.world_size)[strategy.rank]
        image = torch.randint(0, 8, (8, 9), generator=generator).chunk(strategy.world_size)[strategy.rank]
        with CollectiveCounter() as watch:
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
    everything = sum(p.numel() for p in PRIOR.build().parameters() if p.ndim)
    block = PRIOR.build().blocks[0]
    again = sum(p.numel() for p in block.parameters() if p.ndim) * (PRIOR.depth - 1)
    bytes_sent = (everything + again + everything) * 4 // 2
    assert bytes_sent <= full["sent"]["send"] <= bytes_sent * 1.01  # with padding
    # Two bytes less for each number of a linear layer, as often as it is gathered.
    linear = sum(p.numel() for m in block.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    assert full["sent"]["send"] - sixteen["sent"]["send"] == linear * (2 * PRIOR.depth - 1)
    for found in (sixteen, full):
        assert not {"all-to-all", "reduce-scatter"} & set(found["sent"])


@pytest.mark.parametrize("way", [0, 1])
def test_losses_and_gradients_are_those_of_one_process(halves, way):
    found = halves[0][way]
    alone = learn(SingleProcess(), Bf16())
    assert found["loss"] == pytest.approx(alone["loss"], rel=2e-4)
    for name, gradient in alone["grads"].items():
        assert (found["grads"][name] - gradient).norm() <= 1e-2 * gradient.norm() + 1e-6, name
