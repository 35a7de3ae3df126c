"""Weights in shards are on their way before it is their turn, and the last block's stay for the backward pass."""

from typing import Any

import pytest
import torch
from torch import distributed

from limner.distributed.sharded import Sharded, Zero2
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.planner.trackers import CollectiveCounter
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")

PRIOR = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=5, heads=2)


def begun(kind: type[Sharded]) -> tuple[list[int], int]:
    """Count the groups sent when each block begins to compute, and after the update."""
    torch.manual_seed(0)
    config = TrainConfig(steps=1, batch_size=4, precision=Fp32(), optimizer=AdamWConfig(lr=1e-3))
    run = TrainState(PRIOR.build(), Autoregressive(), config, parallel=kind())
    counts: list[int] = []
    blocks: Any = run.model.blocks
    with CollectiveCounter() as watch:
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
