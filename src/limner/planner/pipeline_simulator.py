"""Simulation of an update of a pipeline: time, idle share and memory of each device.

A device computes its passes in the order of the schedule, each as soon as the device is free and the input has arrived.
Transfers overlap computation; those of one link follow each other. After the last micro-batch a stage's gradients are
averaged over the replicas of the pipeline, through one link that all stages share, first ready first.

The units of the model have costs per sample; a stage is their sum for a micro-batch. A stage without backward cost is
frozen, as are all stages before it, and runs forward passes only. With PipeTransformer (He et al. 2021) frozen units
leave the pipeline: the first device computes them for all samples first, or reads their output from a cache, which is
the `prologue`.

Equal stages without transfers have a bubble of (K - 1) / (M + K - 1) with GPipe and 1F1B.

Shapes: S stages, K devices, M micro-batches, R replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from limner.planner.pipeline_schedules import Pass, Schedule, one_forward_one_backward


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a unit per sample, or of a stage per micro-batch.

    Attributes:
        forward, backward: seconds.
        stored: bytes of activations that a forward pass stores for the backward pass.
        output: bytes of the output, which are also those of its gradient.
        weights, gradients, moments: bytes, independent of samples.
    """

    forward: float
    backward: float
    stored: float = 0
    output: float = 0
    weights: float = 0
    gradients: float = 0
    moments: float = 0


def freeze(unit: Cost) -> Cost:
    """Return the cost of a unit that does not train and below which no unit trains."""
    return Cost(forward=unit.forward, backward=0, output=unit.output, weights=unit.weights)


def merge(units: Sequence[Cost], boundaries: Sequence[int], samples: float) -> list[Cost]:
    """Return the stages between the boundaries, for micro-batches of `samples`."""

    def total(name: str, part: Sequence[Cost]) -> float:
        return sum(getattr(unit, name) for unit in part)

    return [
        Cost(
            **{name: samples * total(name, part) for name in ("forward", "backward", "stored")},
            **{name: total(name, part) for name in ("weights", "gradients", "moments")},
            output=samples * part[-1].output,
        )
        for part in (units[a:b] for a, b in pairwise(boundaries))
    ]


@dataclass(frozen=True)
class Link:
    """A link that transfers one message at a time: bytes per second, and seconds per message."""

    bandwidth: float = float("inf")
    latency: float = 0

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline and its replicas.

    Args:
        stages: cost of each stage per micro-batch.
        devices: K, which divides the number of stages.
        microbatches: M.
        schedule: order of the passes.
        link: link between two devices, in one direction.
        replicas: R.
        replica_link: link that carries the gradients of all stages of a pipeline.
        launch: seconds that each pass takes in addition to its stage's cost.
        prologue: seconds of the first device before its first pass.
    """

    stages: Sequence[Cost]
    devices: int
    microbatches: int
    schedule: Schedule = one_forward_one_backward
    link: Link = Link()
    replicas: int = 1
    replica_link: Link = Link()
    launch: float = 0
    prologue: float = 0

    @cached_property
    def orders(self) -> list[list[Pass]]:
        """Passes of each device in order, without backward passes of frozen stages."""
        return [
            [
                step
                for step in self.schedule(device, self.devices, len(self.stages), self.microbatches)
                if not step.backward or self.stages[step.stage].backward
            ]
            for device in range(self.devices)
        ]

    def seconds(self, step: Pass) -> float:
        """Return the time of a pass on its device."""
        stage = self.stages[step.stage]
        return self.launch + (stage.backward if step.backward else stage.forward)

    def inputs(self, step: Pass) -> list[Pass]:
        """Return the passes whose results a pass needs."""
        backward, stage, m = step
        needed = [Pass(False, stage, m)] if backward else []
        neighbor = stage + 1 if backward else stage - 1
        return needed + [Pass(backward, neighbor, m)] * (0 <= neighbor < len(self.stages))

    def receiver(self, step: Pass) -> int | None:
        """Return the device that the result of a pass is sent to, if any."""
        stage = step.stage + (-1 if step.backward else 1)
        if not 0 <= stage < len(self.stages) or (step.backward and not self.stages[stage].backward):
            return None
        return None if (device := stage % self.devices) == step.stage % self.devices else device

    def reduction(self, stage: int) -> float:
        """Return the time to average a stage's gradients over the replicas in a ring."""
        size, rounds = self.stages[stage].gradients, 2 * (self.replicas - 1)
        return rounds * self.replica_link.seconds(size / self.replicas) if size else 0.0


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """An update of a pipeline.

    Attributes:
        seconds: time of the update, with the averaging of gradients.
        computed: time at which the last pass ends.
        busy: seconds in which each device computes.
        microbatches: largest number of passes with stored activations on each device, counted by stage.
        memory: peak bytes of each device: weights, gradients, moments, stored activations.
    """

    seconds: float
    computed: float
    busy: tuple[float, ...]
    microbatches: tuple[int, ...]
    memory: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the devices' time until the last pass in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.computed)


def simulate(pipeline: Pipeline) -> Simulated:
    """Simulate an update."""
    k, ends = pipeline.devices, _pass_ends(pipeline)
    last = Pass(True, 0, pipeline.microbatches - 1)
    ready = [(ends[step], s) for s in range(len(pipeline.stages)) if (step := last._replace(stage=s)) in ends]
    free = 0.0
    for end, stage in sorted(ready):
        free = max(free, end) + pipeline.reduction(stage)
    computed = max(ends.values())
    stored = [_stored(pipeline, order) for order in pipeline.orders]
    state = [sum(s.weights + s.gradients + s.moments for s in pipeline.stages[d::k]) for d in range(k)]
    return Simulated(
        seconds=max(computed, free),
        computed=computed,
        busy=tuple(
            sum(map(pipeline.seconds, order)) + (pipeline.prologue if device == 0 else 0)
            for device, order in enumerate(pipeline.orders)
        ),
        microbatches=tuple(count for count, _ in stored),
        memory=tuple(a + b for a, (_, b) in zip(state, stored, strict=True)),
    )


def _pass_ends(pipeline: Pipeline) -> dict[Pass, float]:
    """Return the time at which each pass ends."""
    devices = range(pipeline.devices)
    ends: dict[Pass, float] = {}
    arrivals: dict[Pass, float] = {}  # of the results, on the device that needs them
    links: dict[tuple[int, int], float] = {}  # time from which a link is free
    clocks = [pipeline.prologue, *(0.0 for _ in devices[1:])]
    positions = [0] * pipeline.devices
    while moved := [
        d
        for d in devices
        if positions[d] < len(pipeline.orders[d])
        and all(step in arrivals for step in pipeline.inputs(pipeline.orders[d][positions[d]]))
    ]:
        for device in moved:
            step = pipeline.orders[device][positions[device]]
            positions[device] += 1
            start = max([clocks[device], *(arrivals[needed] for needed in pipeline.inputs(step))])
            ends[step] = arrivals[step] = clocks[device] = start + pipeline.seconds(step)
            if (receiver := pipeline.receiver(step)) is not None:
                size = pipeline.stages[step.stage - step.backward].output
                links[device, receiver] = max(links.get((device, receiver), 0), ends[step])
                arrivals[step] = links[device, receiver] = links[device, receiver] + pipeline.link.seconds(size)
    return ends


def _stored(pipeline: Pipeline, order: Sequence[Pass]) -> tuple[int, float]:
    """Return the largest number, and bytes, of the stored activations of passes."""
    count = most = 0
    size = peak = 0.0
    for step in order:
        stage = pipeline.stages[step.stage]
        if stage.backward:
            count += -1 if step.backward else 1
            size += -stage.stored if step.backward else stage.stored
        most, peak = max(most, count), max(peak, size)
    return most, peak
