"""Gradients and state in shards: weights are gathered once in an update, where shards of weights gather all blocks but
the last one twice."""

from pathlib import Path

import pytest
import torch
from torch import distributed

from limner.distributed.sharded import Sharded, Zero2
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import is_dtensor
from limner.optim.optimizers import AdamWConfig
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks

COUNTER = Path("/proc/self/io")
pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups"),
    pytest.mark.skipif(not COUNTER.exists(), reason="bytes are counted by Linux"),
]

PRIOR = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(4, 4), width=64, depth=3, heads=2)


def written() -> int:
    """Bytes that this process has written into files and sockets."""
    return int(next(line for line in COUNTER.read_text().splitlines() if line.startswith("wchar:")).split()[1])


def sent(kind: type[Sharded]) -> tuple[int, int, bool]:
    """Bytes of the second update, bytes of the blocks' weights, and whether moments are in shards."""
    torch.manual_seed(0)
    config = TrainConfig(steps=2, batch_size=4, precision=Fp32(), optimizer=AdamWConfig(lr=1e-3))
    run = TrainState(PRIOR.build(), Autoregressive(), config, parallel=kind())
    blocks = sum(p.numel() * p.element_size() for p in run.model.blocks.parameters())
    batch = {"text": torch.randint(0, 20, (2, 8)), "image": torch.randint(0, 8, (2, 16))}
    update(run, batch)
    distributed.barrier()
    before = written()
    update(run, batch)
    distributed.barrier()
    moments = [state["exp_avg"] for optimizer in run.optimizers for state in optimizer.state.values()]
    return written() - before, blocks, all(map(is_dtensor, moments))


def test_weights_of_blocks_are_gathered_once_and_moments_stay_in_shards():
    for (twice, blocks, _), (once, _, shard_on_registration) in zip(
        on_ranks(2, sent, Sharded), on_ranks(2, sent, Zero2), strict=True
    ):
        assert shard_on_registration
        # Each of two processes sends its half of what all gather. The last block is gathered once by both.
        assert twice - once == pytest.approx(blocks / 2 * (PRIOR.depth - 1) / PRIOR.depth, rel=0.1)
