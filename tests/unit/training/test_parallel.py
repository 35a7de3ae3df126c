"""The behavior of a rank, in one process; tests/integration/test_parallel.py has several."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkpoints import read_tensors
from limner.data.stream import Stream
from limner.errors import UserError
from limner.numerics.precision import Fp32
from limner.optim.optimizers import AdamWConfig
from limner.training.checkpoint import latest
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.parallel import Reduction, SingleProcess
from limner.training.train_state import TrainState

CONFIG = TrainConfig(steps=6, batch_size=8, optimizer=AdamWConfig(lr=1e-2), precision=Fp32(), log_every=1)


class Points:
    def __len__(self) -> int:
        return 30

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        return {"x": torch.from_numpy(np.stack([indices % 5, indices % 3], 1)).float()}


class Second(SingleProcess):
    """The second of two ranks; the first has the same sums, and contributes zeros when values are gathered."""

    rank, world_size, is_main = 1, 2, True

    def sum(self, values: Tensor) -> Tensor:
        return values * self.world_size

    def all_gather(self, values: Tensor) -> list[Tensor]:
        return [torch.zeros_like(values), values]


def noisy(model: Any, batch: dict[str, Tensor], step: int, generator: torch.Generator) -> tuple[Tensor, dict]:
    x = batch["x"] + torch.randn(batch["x"].shape, generator=generator)
    return (model(x) - 1).square().mean(), {"index": batch["index"].float().sum()}


def go(out: Path, parallel: SingleProcess, steps: int = 6) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    train(TrainState(model, noisy, replace(CONFIG, steps=steps), parallel=parallel), Stream(Points(), 8), out)
    return [(row["loss"], row["index"]) for row in read_metrics(out / "metrics.jsonl")]


def test_a_rank_resumes_with_its_share_and_its_own_random_numbers(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", Second())
    plan = Stream(Points(), 8)
    assert [index for _, index in whole] == [plan.batch_indices(8 * step)[0][4:].sum() for step in range(6)]
    go(tmp_path / "parts", Second(), steps=2)
    torch.manual_seed(5)
    assert go(tmp_path / "parts", Second()) == whole
    where = latest(tmp_path / "whole")
    assert where and set(read_tensors(where, "rng")) == {"torch", "torch.1", "objective", "objective.1"}


def test_another_number_of_ranks_is_pointed_out(tmp_path: Path) -> None:
    go(tmp_path, SingleProcess(), steps=2)
    with pytest.warns(UserWarning, match="results may differ"):
        go(tmp_path, Second())


def test_another_way_to_compress_gradients_is_pointed_out(tmp_path: Path) -> None:
    """Other shards have other factors."""

    class Compressing(Reduction):
        shards = 2

        def summary(self) -> str:
            return f"gradients are compressed to rank 4 over {self.shards} shards"

    class Strategy(SingleProcess):
        def prepare(self, *arguments: Any) -> nn.Module:
            module = super().prepare(*arguments)
            self.reduction = Compressing()
            return module

    parallel = Strategy()
    go(tmp_path, parallel, steps=2)
    Compressing.shards = 4
    with pytest.warns(UserWarning, match="was written by .* to rank 4 over 2 shards: results may differ"):
        go(tmp_path, parallel)


def test_a_batch_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    class Third(Second):
        rank, world_size = 2, 3

    with pytest.raises(UserError, match="multiple of 3"):
        go(tmp_path, Third())
