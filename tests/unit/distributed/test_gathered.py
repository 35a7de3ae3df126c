"""An evaluation of weights in shards: blocks are gathered one by one, and it changes nothing in the training."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from limner.distributed.sharded import Sharded, Zero2
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Bf16
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import is_dtensor
from limner.optim.optimizers import AdamWConfig
from limner.training.config import TrainConfig
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch lacks process groups")

PRIOR = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=3, heads=2)
WAYS: dict[str, Any] = {"sharded": Sharded, "zero2": Zero2}


def learn(parallel: Parallel, evaluates: bool) -> tuple[list[float], list[float], int]:
    """Losses, evaluation metrics of averaged weights, and the largest number of blocks with full weights."""
    torch.manual_seed(0)
    config = TrainConfig(steps=3, batch_size=8, precision=Bf16(), optimizer=AdamWConfig(lr=0.01), ema_decay=0.5)
    run = TrainState(PRIOR.build(), Autoregressive(), config, parallel=parallel)
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


def all_of() -> dict[str, Any]:
    return {way: (learn(make(), True), learn(make(), False)) for way, make in WAYS.items()}


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return on_ranks(2, all_of)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_gathered_one_by_one_and_training_goes_on_as_without(measured, way):
    expected = learn(SingleProcess(), True)
    for rank in measured:
        (losses, metrics, whole), (without, _, _) = rank[way]
        assert losses == without
        assert metrics == pytest.approx(expected[1], rel=1e-3) and len(set(metrics)) == 3
        if way == "sharded":
            assert whole == 1
