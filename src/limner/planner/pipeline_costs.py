"""Costs of a prior's units, and pipelines of a launch without sharding: memory, bubble, time (1F1B).

The units are embeddings, resblocks and head. Arithmetic takes the time of its FLOPs at the GPU's assumed utilization,
the backward pass twice that of the forward pass, or three times with checkpointing. Memory is that of `launch.py` and
`activations.py`; a stage has one 16-bit copy of its matrices if its weights are in 32 bits.
"""

from __future__ import annotations

from math import prod

from limner.planner.activations import Activations
from limner.planner.cost import FP32, HALF, Shape, attended_pairs, moment_bytes, num_positions, parameter_shapes
from limner.planner.gpus import GPUS
from limner.planner.launch import Launch
from limner.planner.launch_search import Cluster
from limner.planner.pipeline_search import PipelineEstimate, search
from limner.planner.pipeline_simulator import Cost, Link, Pipeline


def prior_units(launch: Launch, rate: float) -> list[Cost]:
    """Return the cost per sample of each unit of a launch's prior at a rate in FLOP/s."""
    c, n = launch.config, num_positions(launch.config)
    block, rest = parameter_shapes(c)
    logits = (c.text_len - 1) * c.text_vocab + c.grid[0] * c.grid[1] * c.image_vocab
    attention = [8 * n * c.width**2 + 4 * c.width * attended_pairs(c, pattern) for pattern in c.patterns]
    resblocks = [flops for layer in attention for flops in (layer, 16 * n * c.width**2)]
    flops = [n * c.width, *resblocks, 2 * c.width * logits]  # an embedding adds its rows
    activations = _activations(launch, 1)
    stored = [0, *activations.resblocks, activations.head_inputs]
    parts = [_state(launch, block, f"blocks.0.{name}.") for name in ("attention", "mlp")]
    states = [_state(launch, rest, "embed."), *c.depth * parts, _state(launch, rest, "head.")]
    passes = 3 if launch.training.checkpoint_activations else 2
    return [
        Cost(
            forward=work / rate, backward=passes * work / rate, stored=size, output=FP32 * n * c.width,
            weights=weights + copies, gradients=weights, moments=moments,
        )
        for work, size, (weights, copies, moments) in zip(flops, stored, states, strict=True)
    ]  # fmt: skip


def _activations(launch: Launch, samples: int) -> Activations:
    return Activations(
        config=launch.config, samples=samples, copies=False, device=launch.device,
        checkpointing=launch.training.checkpoint_activations,
    )  # fmt: skip


def _state(launch: Launch, shapes: dict[str, Shape], prefix: str) -> tuple[float, float, float]:
    """Return the bytes of a unit's weights, of 16-bit copies, and of the optimizer's moments and averaged weights."""
    training, blocks = launch.training, prefix.startswith("blocks.")
    averages = FP32 * (training.ema_decay is not None and not training.ema_on_cpu)
    weights = copies = moments = 0.0
    for shape in (shape for name, shape in shapes.items() if name.startswith(prefix)):
        matrix, count = blocks and len(shape) == 2, prod(shape)
        weights += count * (HALF if matrix and launch.stores_16bit else FP32)
        copies += count * HALF * (matrix and not launch.stores_16bit)
        moments += count * (averages + moment_bytes(training.optimizer)[(0 if matrix else 1) if blocks else 2])
    return weights, copies, moments


def pipelines(launch: Launch, cluster: Cluster) -> list[PipelineEstimate]:
    """Return the fastest pipeline of each number of stages within a machine, sorted by time."""
    kind, machine = GPUS[cluster.gpu], min(cluster.per_machine, launch.gpus)
    within = Link(kind.intra_node_bandwidth)
    settings = Pipeline(
        stages=(), devices=1, microbatches=1, link=within,
        replica_link=Link(cluster.bandwidth) if launch.gpus > machine else within,
    )  # fmt: skip
    units = prior_units(launch, kind.peak_flops * kind.mfu)
    found = search(units, launch.gpus, launch.training.batch_size, settings, machine)
    return [estimate for estimate in found if estimate.settings.devices > 1]


def peak_bytes(launch: Launch, estimate: PipelineEstimate) -> list[float]:
    """Return the peak of each device: its state and activations, the work of a resblock, in the last stage logits."""
    activations = _activations(launch, estimate.samples)
    first = [size + activations.workspace for size in estimate.simulated.memory]
    return [*first[:-1], first[-1] + activations.logits]
