"""Search for the fastest launch on a number of GPUs: sharding (FSDP or zero2), replicas, micro-batches, checkpointing,
PowerSGD's rank.

Every division of the GPUs is calculated (`launch.py`); the launches that fit into memory are sorted by step time.
Computation overlaps the traffic within machines (Figure 5 of Ramesh et al. 2021) but not the traffic between machines.

Traffic of a machine's link, if ranks are numbered machine by machine: a ring of S ranks crosses the link once if S
exceeds the number M of GPUs in a machine. Each shard has a separate ring between replicas, so a link carries min(S, M)
of these rings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import get_args

from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.planner.cost import default_rank
from limner.planner.gpus import GPUS
from limner.planner.launch import Kind, Launch
from limner.quantization.precisions import Bf16Weights, Fp16Weights
from limner.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines with `per_machine` GPUs of a type in `GPUS`. `link` is the bandwidth of a machine in bytes/s, by default
    the usual one for the GPU type."""

    gpu: str
    per_machine: int = 8
    link: float | None = None

    @property
    def bandwidth(self) -> float:
        """Bandwidth between a machine and the other machines in bytes/s."""
        return GPUS[self.gpu].inter_node_bandwidth * self.per_machine if self.link is None else self.link

    def holds(self, peak: float) -> bool:
        """Return True if a peak, in bytes, is at most 90% of a GPU's memory: a margin for estimation error and GPU
        drivers."""
        return peak <= 0.9 * GPUS[self.gpu].memory


@dataclass(frozen=True, kw_only=True)
class LaunchEstimate:
    """A launch on a cluster with its estimated time per step."""

    launch: Launch
    cluster: Cluster

    @property
    def fits(self) -> bool:
        """True if a GPU of the cluster holds the peak."""
        return self.cluster.holds(self.launch.peak)

    @property
    def compute_seconds(self) -> float:
        kind = GPUS[self.cluster.gpu]
        return self.launch.flops / (kind.peak_flops * kind.mfu)

    @property
    def within_seconds(self) -> float:
        """Time of the traffic within machines."""
        return self._sent[0] / GPUS[self.cluster.gpu].intra_node_bandwidth

    @property
    def between_seconds(self) -> float:
        """Time of the traffic between machines."""
        return self._sent[1] / self.cluster.bandwidth

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.within_seconds) + self.between_seconds

    @property
    def _sent(self) -> tuple[float, float]:
        """Bytes through a GPU's link within its machine, and through the link of the machine."""
        launch, m = self.launch, min(self.cluster.per_machine, self.launch.gpus)
        shards = launch.sent["all-gather"] + launch.sent["reduce-scatter"]
        within, between = (0, shards) if launch.shards > m else (shards, 0)
        replicas = launch.sent["all-reduce"]
        if launch.gpus > m:
            return within, between + replicas * min(launch.shards, m)
        return within + replicas, between


def enumerate_launches(
    config: TransformerConfig, training: TrainConfig, gpus: int, cluster: Cluster, replicas: int | None = None,
    rank: int | None = None,
) -> list[LaunchEstimate]:  # fmt: skip
    """Return all launches of a prior on `gpus` GPUs, sorted by fitting into memory, then by step time.

    On GPUs without bf16, products are in fp16 with the paper's per-resblock gradient scales.

    Args:
        replicas, rank: restrict the search; by default all numbers of replicas, without PowerSGD and with the paper's
            rank (Table 1).

    Raises `UserError` if no launch is possible because the numbers are not divisible.
    """
    if not GPUS[cluster.gpu].bf16 and isinstance(training.precision, Auto | Bf16):
        stored = isinstance(training.precision, Bf16Weights)
        training = replace(training, precision=Fp16Weights() if stored else Fp16(), scaling="resblocks")
    micro_batches = _divisors(max(1, training.batch_size // gpus))
    uncompressed = [
        Launch(config=config, training=settings, gpus=gpus, replicas=count, kind=kind)
        for count in ([replicas] if replicas else _replicas(gpus, config.width, cluster.per_machine))
        for kind in get_args(Kind)[: 1 + (count < gpus)]  # equal for a single shard
        for parts in micro_batches
        for saved in (False, True)
        for settings in [replace(training, accumulate=parts, checkpoint_activations=saved)]
    ]
    if rank is None:
        launches = uncompressed + [variant for launch in uncompressed if (variant := compressed(launch))]
    else:
        launches = [variant for launch in uncompressed if (variant := compressed(launch, rank))]
        launches = launches or [replace(launch, rank=rank) for launch in uncompressed]  # raises with the reason
    return sorted((LaunchEstimate(launch=launch, cluster=cluster) for launch in launches), key=_sort_key)


def _sort_key(estimate: LaunchEstimate) -> tuple[bool, float, int, int, float]:
    """Return the key: step time, or peak if the launch does not fit; ties by PowerSGD rank, micro-batches, peak."""
    launch, fits = estimate.launch, estimate.fits
    parts = launch.training.accumulate
    return not fits, estimate.seconds if fits else launch.peak, launch.rank or 0, parts, launch.peak


def compressed(launch: Launch, rank: int | None = None) -> Launch | None:
    """Return the launch with a rank, by default the paper's; None if that rank is not possible."""
    rank = rank or launch.shards * ceil(default_rank(launch.config.width) / launch.shards)
    return None if launch.rank_problem(rank) else replace(launch, rank=rank)


def _replicas(gpus: int, width: int, m: int) -> list[int]:
    """Return the replica counts whose shards divide or fill machines, without empty matrix shards."""
    counts = [count for count in _divisors(gpus) if gpus // count <= width]
    return [count for count in counts if (s := gpus // count) % m == 0 or m % s == 0 or s == gpus]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def launch_command(
    estimate: LaunchEstimate, recipe: str, defaults: TrainConfig, default_compression: int | None = None
) -> str:
    """Return the multi-line shell command; options equal to the recipe's training and rank are omitted."""
    launch, training, m = estimate.launch, estimate.launch.training, estimate.cluster.per_machine
    lines = [f"limner train DATA --recipe {recipe} --out RUN --stages prior"]
    if launch.gpus > 1:
        machines = (
            f"--nnodes {ceil(launch.gpus / m)} --nproc-per-node {m} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
        )
        parallel = f"--parallel {launch.kind} --dp-replicate {launch.replicas}"
        if launch.replicas > 1 and launch.rank != default_compression:
            compression = f"powersgd --grad-compression.rank {launch.rank}" if launch.rank else "none"
            parallel += f" --grad-compression {compression}"
        processes = machines if launch.gpus > m else f"--nproc-per-node {launch.gpus}"
        lines = [f"torchrun {processes} -m", *lines, parallel]
    overrides = [
        f"--prior.training.{name.replace('_', '-')} {value}"
        for name in ("batch_size", "accumulate")
        if (value := getattr(training, name)) != getattr(defaults, name)
    ]
    if training.precision != defaults.precision:
        precision = type(training.precision).__name__.lower()
        overrides.append(f"--prior.training.precision {precision} --prior.training.scaling {training.scaling}")
    if training.checkpoint_activations != defaults.checkpoint_activations:
        overrides.append(f"--prior.training.{'' if training.checkpoint_activations else 'no-'}checkpoint-activations")
    return " \\\n    ".join([*lines, " ".join(overrides)] if overrides else lines)
