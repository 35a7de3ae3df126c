"""Search for the fastest pipelines on several devices: stages, replicas, cuts, micro-batches (He et al. 2021).

Each number of stages K that divides the devices is simulated with M from K to 6 K micro-batches, as the paper profiles
it. An update takes at least M passes of the slowest stage, so the cuts start at those of the smallest slowest stage
(`partition`); then single cuts move by a unit as long as the update becomes faster. A test compares the result with all
cuts of small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from limner.distributed.pipeline_layout import MAX_MICROBATCHES_PER_STAGE, partition
from limner.planner.pipeline_simulator import Cost, Pipeline, Simulated, merge, simulate


@dataclass(frozen=True, kw_only=True)
class PipelineEstimate:
    """A pipeline of the units between the boundaries."""

    units: Sequence[Cost]
    boundaries: tuple[int, ...]
    samples: int  # of a micro-batch
    settings: Pipeline

    @cached_property
    def simulated(self) -> Simulated:
        return simulate(replace(self.settings, stages=merge(self.units, self.boundaries, self.samples)))

    @property
    def seconds(self) -> float:
        return self.simulated.seconds

    def refine(self) -> PipelineEstimate:
        """Return the pipeline after moves of single cuts, each of which makes the update faster."""
        b = self.boundaries
        moved = [
            replace(self, boundaries=(*b[:i], cut, *b[i + 1 :]))
            for i in range(1, len(b) - 1)
            for cut in (b[i] - 1, b[i] + 1)
            if b[i - 1] < cut < b[i + 1]
        ]
        best = min([self, *moved], key=lambda estimate: estimate.seconds)
        return self if best is self else best.refine()


def search(
    units: Sequence[Cost], devices: int, samples: int, settings: Pipeline, longest: int | None = None
) -> list[PipelineEstimate]:
    """Return the fastest pipeline of each number of stages, sorted by the time of an update.

    Micro-batches have equal sizes. A number of stages that allows none is left out.

    Args:
        units: cost of each unit per sample.
        devices: K R; each of the R replicas is a pipeline of K devices with one stage each.
        samples: samples of an update, over all replicas.
        settings: links, schedule, and times that do not depend on the search; `prologue` is per sample.
        longest: largest number of stages, such as the GPUs of a machine; by default the number of units.
    """
    times = [unit.forward + unit.backward for unit in units]
    fastest = []
    lengths = range(1, min(devices, len(units), longest or devices) + 1)
    for k in (k for k in lengths if devices % k == 0 and samples * k % devices == 0):
        share, boundaries = samples * k // devices, partition(times, k)
        estimates = [
            PipelineEstimate(
                units=units, boundaries=boundaries, samples=share // m,
                settings=replace(
                    settings, devices=k, microbatches=m, replicas=devices // k, prologue=settings.prologue * share
                ),
            )
            for m in range(k, MAX_MICROBATCHES_PER_STAGE * k + 1)
            if share % m == 0
        ]  # fmt: skip
        if estimates:
            fastest.append(min(estimates, key=lambda estimate: estimate.seconds).refine())
    return sorted(fastest, key=lambda estimate: estimate.seconds)
