"""Schedules of pipelines: the order in which each device computes forward and backward passes of micro-batches.

Stage s of S runs on device s mod K. The orders are those of `torch.distributed.pipelining`:

    GPipe             all forward passes, then all backward passes (Huang et al. 2019)
    1F1B              device k starts with K - k - 1 forward passes, then alternates: at most K - k micro-batches have
                      stored activations (Narayanan et al. 2019, 2021)
    interleaved 1F1B  1F1B with S / K stages per device, which fills the pipeline in shorter passes (Narayanan et al.
                      2021, §2.2)

Shapes: S stages, K devices, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from limner.errors import UserError


class Pass(NamedTuple):
    """A forward or backward pass of a micro-batch through a stage."""

    backward: bool
    stage: int
    microbatch: int


#: Returns a device's order from (device, K, S, M).
Schedule = Callable[[int, int, int, int], list[Pass]]


def gpipe(device: int, devices: int, stages: int, microbatches: int) -> list[Pass]:
    """Order of GPipe."""
    local = range(device, stages, devices)
    forward = [Pass(False, stage, m) for stage in local for m in range(microbatches)]
    return forward + [Pass(True, stage, m) for stage in reversed(local) for m in range(microbatches)]


def one_forward_one_backward(device: int, devices: int, stages: int, microbatches: int) -> list[Pass]:
    """Order of 1F1B. Raises `UserError` unless each device has one stage."""
    if stages != devices:
        raise UserError(f"1F1B has one stage per device, not {stages} on {devices}: choose interleaved 1F1B")
    numbers = range(microbatches)
    forward, backward = [Pass(False, device, m) for m in numbers], [Pass(True, device, m) for m in numbers]
    return _alternate(forward, backward, devices - device - 1)


def interleaved(device: int, devices: int, stages: int, microbatches: int) -> list[Pass]:
    """Order of interleaved 1F1B: rounds of about K micro-batches, each through all stages of a device.

    Raises `UserError` if S is not a multiple of K, or M of the number of rounds.
    """
    per_device, rounds = stages // devices, max(1, microbatches // devices)
    if stages % devices or microbatches % rounds:
        raise UserError(
            f"interleaved 1F1B cannot run {microbatches} micro-batches through {stages} stages on {devices} devices: "
            f"choose multiples of {devices}"
        )
    size = microbatches // rounds
    visits = [
        (local, first + m)
        for first in range(0, microbatches, size)
        for local in range(per_device)
        for m in range(size)
    ]  # fmt: skip
    forward = [Pass(False, local * devices + device, m) for local, m in visits]
    backward = [Pass(True, (per_device - 1 - local) * devices + device, m) for local, m in visits]
    return _alternate(forward, backward, (per_device - 1) * size + 2 * (devices - device - 1))


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved}


def _alternate(forward: Sequence[Pass], backward: Sequence[Pass], warmup: int) -> list[Pass]:
    """Return `warmup` forward passes, pairs of a forward and a backward pass, then the remaining backward passes."""
    rest = forward[warmup:]
    pairs = (step for pair in zip(rest, backward, strict=False) for step in pair)
    return [*forward[:warmup], *pairs, *backward[len(rest) :]]
