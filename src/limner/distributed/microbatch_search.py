"""The number of micro-batches M of a pipeline: 2 K, or the fastest one in the first updates (He et al. 2021).

A larger M shortens the time in which stages wait, but its passes are smaller, and less of the backward pass is left in
which replicas can average gradients. The best M depends on devices and links, so PipeTransformer times M from K to 6 K,
once for each pipeline length K (Algorithm 1). Here the timed updates are those of training: gradients do not depend on
M, up to the order of sums. The price is that two runs with one seed may round differently, because times differ.
"""

from __future__ import annotations

import time
from collections import defaultdict

import torch
from torch import distributed

from limner.distributed.pipeline_layout import PipelineLayout
from limner.distributed.pipeline_schedule import count_microbatches, microbatch_candidates

__all__ = ["MicrobatchCount", "MicrobatchSearch"]

UPDATES_PER_CANDIDATE = 3  # of which the fastest counts; the first one also builds the schedule


class MicrobatchCount:
    """Sets M to 2 K, by the rules of `count_microbatches`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def choose(self, rows: int, layout: PipelineLayout, least: int) -> int:
        """Return M for the next update, the same on all processes."""
        return count_microbatches(rows, layout, least)

    def begin(self, stages: int, microbatches: int) -> None:
        """Called before the gradients of an update with K stages and M micro-batches are computed."""

    def end(self) -> None:
        """Called when the gradients are complete, by all processes."""


class MicrobatchSearch(MicrobatchCount):
    """Tries the `microbatch_candidates` of each K and keeps the fastest.

    Attributes:
        seconds: times of updates by (K, M), each the longest of all processes and therefore the same on all.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.seconds = defaultdict[tuple[int, int], list[float]](list)
        self._timed: tuple[int, int] | None = None  # K and M of an update that has begun
        self._start = 0.0

    def choose(self, rows: int, layout: PipelineLayout, least: int) -> int:
        times = {m: self.seconds[layout.stages, m] for m in microbatch_candidates(rows, layout, least)}
        untimed = [m for m, seconds in times.items() if len(seconds) < UPDATES_PER_CANDIDATE]
        return untimed[0] if untimed else min(times, key=lambda m: min(times[m]))

    def begin(self, stages: int, microbatches: int) -> None:
        key = stages, microbatches
        self._timed = key if len(self.seconds[key]) < UPDATES_PER_CANDIDATE else None
        if self._timed:
            self._start = self.clock()

    def end(self) -> None:
        if self._timed:
            seconds = torch.tensor(self.clock() - self._start, dtype=torch.float64, device=self.device)
            distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
            self.seconds[self._timed].append(float(seconds))
            self._timed = None

    def clock(self) -> float:
        """Return the time in seconds once the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
