"""AutoCache: a frozen part computes each sample once (He et al. 2021, PipeTransformer).

While blocks 0 ... k - 1 are frozen, their output for a sample is the same in each epoch. `AutoCache` reads it from an
`ActivationCache`, and the model computes from block k on. A missing record is computed, from the record of an earlier,
smaller k if there is one, and written.

The frozen part computes one sample at a time, read or not, so that its values do not depend on the batch nor on what
the cache holds: a resumed run has the same losses bit for bit. On a CPU that takes as long as the batch together.

Reading starts only if it is faster than computing (Figure 12 of the blog): both are timed on one sample whenever the
number of frozen blocks changes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from limner.blocks import leading_part
from limner.data.activations import ActivationCache, check_repeats, identity
from limner.data.stream import Dataset
from limner.data.token_cache import weights_hash
from limner.errors import UserError
from limner.training.freezing import Freezing
from limner.training.hooks import Hook
from limner.training.train_module import StagedObjective, frozen_output
from limner.training.train_state import TrainState

__all__ = ["CACHE", "AutoCache"]

CACHE = "activations"  # folder of a run
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
TIMINGS = 3  # of which the fastest counts


class AutoCache(Hook):
    """Caches the output of the part of `run.model` that `freezing` has frozen, for the run's objective.

    Args:
        run: its objective must be a `StagedObjective`; another one replaces it until the hook closes.
        freezing: an earlier hook of the same run.
        folder: folder of the cache's file.
        max_bytes: bound of the file's size.
        datasets: data of the run.

    Attributes:
        depth: number of blocks whose output is cached.
        reads: True if reading a record is faster than computing it.
        read_seconds, computed_seconds: time of reading and of computing the sample that was timed last.
        hits, rows: samples that were read, and all samples, since the last row of metrics.

    Raises `UserError` if the tokens of a sample or its activations differ between epochs, or the objective is not a
    `StagedObjective`.
    """

    def __init__(
        self, run: TrainState, freezing: Freezing, folder: Path, max_bytes: int, datasets: Sequence[Dataset]
    ) -> None:
        for dataset in datasets:
            check_repeats(dataset)
        modules = nn.ModuleList(leading_part(run.model, sys.maxsize)).modules()
        if any(isinstance(module, DROPOUTS) and module.p for module in modules):
            raise UserError("dropout gives a sample other activations in each epoch: train without the cache")
        self.freezing, self.folder, self.max_bytes, self.trainable = freezing, folder, max_bytes, run.trainable
        self.objective: Any = run.trainable.objective
        if not isinstance(self.objective, StagedObjective):
            name = type(self.objective).__name__
            raise UserError(f"{name} does not separate what is before and after the blocks: train without the cache")
        run.trainable.objective = _FromBoundary(self, self.objective)
        self.number_format = str(run.config.precision.dtype(run.device))
        self.cache: ActivationCache | None = None
        self.depth = 0
        self.sources = dict[int, bytes]()  # identity of each part that is frozen since it was cached, by depth
        self.reads: bool | None = None
        self.read_seconds = self.computed_seconds = 0.0
        self.hits = self.rows = 0

    def before_step(self, run: TrainState) -> None:
        if self.freezing.depth != self.depth:
            self.depth, self.reads = self.freezing.depth, None
            sources = {depth: source for depth, source in self.sources.items() if depth <= self.depth}
            self.sources = {self.depth: b""} | sources if self.depth else sources

    def _source(self, model: Any, depth: int) -> bytes:
        """Return the identity of a frozen part, of which only the first stage of a pipeline has the weights."""
        if not self.sources[depth]:
            weights = weights_hash(nn.ModuleList(leading_part(model, depth)))
            self.sources[depth] = identity(weights, self.number_format, repr(model.config), torch.__version__)
        return self.sources[depth]

    @torch.no_grad()
    def activations(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the input of block `depth`, [B, n, D]."""
        rows = range(len(batch["text"]))
        tokens = [batch[name].cpu().numpy() for name in ("text", "image")]
        samples = [identity(*(part[i].tobytes() for part in tokens)) for i in rows]
        parts = [{name: batch[name][i : i + 1] for name in ("text", "image")} for i in rows]
        if self.reads is None:
            self._measure(model, samples[0], parts[0])
        self.rows += len(rows)
        return torch.cat([self._row(model, sample, part) for sample, part in zip(samples, parts, strict=True)])

    def _row(self, model: Any, sample: bytes, part: Mapping[str, Tensor]) -> Tensor:
        """Return the activations of one sample, [1, n, D]."""
        if not self.reads or self.cache is None:
            return self._compute(model, part)
        for depth in sorted(self.sources, reverse=True):
            if (record := self.cache.read(sample, self._source(model, depth))) is not None:
                x = record[None].to(part["text"].device)
                if depth == self.depth:
                    self.hits += 1
                    return x
                x = model.run(x, depth, self.depth)
                break
        else:
            x = self._compute(model, part)
        self.cache.write(sample, self._source(model, self.depth), x[0].cpu())
        return x

    def _compute(self, model: Any, part: Mapping[str, Tensor]) -> Tensor:
        return frozen_output(self.objective, model, part, self.depth)

    def _measure(self, model: Any, sample: bytes, part: Mapping[str, Tensor]) -> None:
        """Decide if activations are read, by timing one sample."""
        x = self._compute(model, part)
        if x.dtype != torch.float32:
            raise UserError(
                f"activations are cached in fp32, but this precision has {x.dtype}: train without the cache"
            )
        if self.cache is None:
            self.cache = ActivationCache(self.folder, (x.shape[1], x.shape[2]), self.max_bytes)
        cache, source = self.cache, self._source(model, self.depth)
        cache.write(sample, source, x[0].cpu())
        self.read_seconds = _fastest(lambda: cache.read(sample, source))
        self.computed_seconds = _fastest(lambda: self._compute(model, part)[0].cpu())
        self.reads = self.read_seconds < self.computed_seconds

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        if self.rows:
            row |= {"cache/hits": self.hits / self.rows, "cache/reads": bool(self.reads)}
            row |= {"cache/read_ms": 1e3 * self.read_seconds, "cache/compute_ms": 1e3 * self.computed_seconds}
            self.hits = self.rows = 0

    def close(self) -> None:
        self.trainable.objective = self.objective
        if self.cache is not None:
            self.cache.close()


class _FromBoundary:
    """The objective of a run in stages, computed from the activations of an `AutoCache`."""

    def __init__(self, cached: AutoCache, objective: Any) -> None:
        self.cached, self.objective = cached, objective
        if hasattr(objective, "batch_stats"):
            self.batch_stats = objective.batch_stats

    def __call__(
        self, model: Any, batch: Any, step: int, generator: torch.Generator
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        if not (depth := self.cached.depth):
            return self.objective(model, batch, step, generator)
        return self.loss(model, batch, model.run(self.frozen_output(model, batch, depth), depth))

    def inputs(self, model: Any, batch: Any) -> Tensor:
        return self.objective.inputs(model, batch)

    def frozen_output(self, model: Any, batch: Any, depth: int) -> Tensor:
        return self.cached.activations(model, batch)

    def loss(self, model: Any, batch: Any, x: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.objective.loss(model, batch, x)


def _fastest(work: Callable[[], object]) -> float:
    """Return the shortest time of `TIMINGS` calls, in seconds."""
    times = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
