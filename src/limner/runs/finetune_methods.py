"""Methods of finetuning: what of a prior trains, and what a run writes.

lora      low-rank updates of the linear layers, kept in a small file (`adapters.py`)
full      all weights
elastic   all weights, of which leading blocks freeze and are cached (`training/freezing.py`, `auto_cache.py`)
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch

from limner import adapters
from limner.data.stream import Dataset
from limner.models.transformer import Transformer
from limner.numerics.seeding import fold_in
from limner.optim.optimizers import AdamWConfig
from limner.pipeline import TextToImage
from limner.retrieval import Examples
from limner.training.auto_cache import CACHE, AutoCache
from limner.training.config import TrainConfig
from limner.training.freezing import Freezing
from limner.training.freezing_rules import AnyFreezingRule, GuardedFreezing
from limner.training.hooks import Hook
from limner.training.train_state import TrainState
from limner.validation import SEEDS, Range, Validated

__all__ = ["METHODS", "ElasticFinetuning", "FinetuneConfig", "FullFinetuning", "LoRA"]


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Validated):
    """Settings that all methods share.

    Args:
        steps: maximal number of updates; training stops earlier when it does not improve.
        batch_size: samples per update.
        ordinary_share: share of ordinary samples in a batch, which prevent forgetting.
        lr: learning rate.
        score_every: updates between two measurements of new and ordinary pictures.
        seed: seed of initial updates, order of samples, and ordinary samples.

    `name`: name of the method.
    """

    name: ClassVar[str]
    steps: Annotated[int, Range(1, 10**7)] = 60
    batch_size: Annotated[int, Range(2, 2**16)] = 16
    ordinary_share: Annotated[float, Range(0, lt=1)] = 0.5
    lr: Annotated[float, Range(gt=0)] = 1e-4
    score_every: Annotated[int, Range(1, 10**6)] = 10
    seed: Annotated[int, SEEDS] = 0

    @property
    def ordinary_samples(self) -> int:
        """Ordinary samples in a batch; at least one sample is new."""
        return min(round(self.batch_size * self.ordinary_share), self.batch_size - 1)

    @property
    def training(self) -> TrainConfig:
        return TrainConfig(
            steps=self.steps, batch_size=self.batch_size, clip_norm=1.0, warmup_steps=10,
            optimizer=AdamWConfig(lr=self.lr, betas=(0.9, 0.99), weight_decay=0.0), seed=self.seed,
            eval_every=self.score_every, checkpoint_every=self.score_every, log_every=self.score_every,
        )  # fmt: skip

    @property
    def record(self) -> dict[str, Any]:
        """Settings of the method that a resumed run may not change."""
        raise NotImplementedError

    @property
    def info(self) -> dict[str, Any]:
        """Entries of the bundle's info."""
        raise NotImplementedError

    def prepare(self, prior: Transformer) -> None:
        """Choose the parameters that train, with `requires_grad`."""
        raise NotImplementedError

    def hooks(self, run: TrainState, out: Path, datasets: Sequence[Dataset]) -> list[Hook]:
        """Return the hooks of the run in the folder `out` on `datasets`."""
        return []

    def finish(
        self, pipe: TextToImage, start: str, folder: Path, out: Path, learned: Examples | None
    ) -> TextToImage:  # fmt: skip
        """Write files of the method to `out`, and return the pipeline of the finetuned bundle. `pipe` has the trained
        prior; `start` names the bundle in `folder` from which training started. `learned` are the new pictures if the
        prior follows examples; those of `pipe` contain them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LoRA(FinetuneConfig):
    """A LoRA adapter, as a separate file and merged into a bundle.

    Args:
        rank: rank of the updates; the adapter has rank * (inputs + outputs) numbers for each linear layer.
    """

    name = "lora"
    steps: Annotated[int, Range(1, 10**7)] = 100
    lr: Annotated[float, Range(gt=0)] = 5e-4
    rank: Annotated[int, Range(1, adapters.MAX_RANK)] = 8

    @property
    def record(self) -> dict[str, Any]:
        return {"adapter": {"rank": self.rank, "ordinary_samples": self.ordinary_samples}}

    @property
    def info(self) -> dict[str, Any]:
        return {"adapter_rank": self.rank}

    def prepare(self, prior: Transformer) -> None:
        torch.manual_seed(fold_in(self.seed))
        adapters.add_adapter(prior, self.rank, alpha=2 * self.rank)

    def finish(
        self, pipe: TextToImage, start: str, folder: Path, out: Path, learned: Examples | None
    ) -> TextToImage:  # fmt: skip
        adapters.save(pipe.prior, out / "adapter", start, folder / "prior.safetensors", learned)
        return TextToImage.from_pretrained(folder, adapter=out / "adapter")


@dataclass(frozen=True, kw_only=True)
class FullFinetuning(FinetuneConfig):
    """All weights of the prior."""

    name = "full"

    @property
    def record(self) -> dict[str, Any]:
        return {"finetuning": {"method": self.name, "ordinary_samples": self.ordinary_samples}}

    @property
    def info(self) -> dict[str, Any]:
        return {"finetuning": self.name}

    def prepare(self, prior: Transformer) -> None:
        prior.requires_grad_(True)

    def finish(
        self, pipe: TextToImage, start: str, folder: Path, out: Path, learned: Examples | None
    ) -> TextToImage:  # fmt: skip
        return pipe


@dataclass(frozen=True, kw_only=True)
class ElasticFinetuning(FullFinetuning):
    """All weights of the prior. Leading blocks freeze when they have converged, and their output is cached.

    Args:
        freezing: rule by which blocks freeze.
        freeze_every: updates between two decisions of the rule.
        cache_mb: largest size of the cache in MiB; 0 trains without one.
    """

    name = "elastic"
    freezing: AnyFreezingRule = field(default_factory=GuardedFreezing)
    freeze_every: Annotated[int, Range(1, 10**6)] = 5
    cache_mb: Annotated[int, Range(0, 10**7)] = 1024

    @property
    def record(self) -> dict[str, Any]:
        return super().record | {"freezing": self.freezing.record(self.freeze_every)}

    def hooks(self, run: TrainState, out: Path, datasets: Sequence[Dataset]) -> list[Hook]:
        freezing = Freezing(run, self.freezing, self.freeze_every, _score)
        if not self.cache_mb:
            return [freezing]
        return [freezing, AutoCache(run, freezing, out / CACHE, self.cache_mb << 20, datasets)]

    def finish(
        self, pipe: TextToImage, start: str, folder: Path, out: Path, learned: Examples | None
    ) -> TextToImage:  # fmt: skip
        shutil.rmtree(out / CACHE, ignore_errors=True)
        return pipe


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["new"] + metrics["ordinary"]


#: The methods by name.
METHODS: dict[str, type[FinetuneConfig]] = {m.name: m for m in (LoRA, FullFinetuning, ElasticFinetuning)}
