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
from typing import Generic, TypeVar, get_args

from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.planner.launch import Kind, Launch
from limner.planner.paper_layout import PaperLayout, default_rank
from limner.quantization.precisions import Bf16Weights, Fp16Weights
from limner.training.config import TrainConfig

Layout = TypeVar("Layout", Launch, PaperLayout)


@dataclass(frozen=True)
class GPU:
    """Memory in bytes, dense 16-bit peak in FLOP/s, bandwidth of one GPU within its machine and to other machines in
    bytes/s, assumed model FLOPs utilization (MFU) of training, and support of bf16."""

    memory: float
    peak_flops: float
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    mfu: float
    bf16: bool = True


GPUS = {  # vendor specifications, usual networks
    "v100-16gb": GPU(16 * 2**30, 125e12, 150e9, 1.5e9, 0.35, bf16=False),
    "a100-80gb": GPU(80 * 2**30, 312e12, 300e9, 25e9, 0.45),
    "h100-80gb": GPU(80 * 2**30, 989e12, 450e9, 50e9, 0.4),
    "h200-141gb": GPU(141e9, 989e12, 450e9, 50e9, 0.4),
}


@dataclass(frozen=True, kw_only=True)
class Estimate(Generic[Layout]):
    """A layout on a cluster.

    Args:
        fits: the peak is at most 90% of the memory: a margin for estimation error and GPU drivers.
        compute_seconds, within_seconds, between_seconds, seconds: time of a step's computation, of its traffic within
            and between machines, and of the whole step.
    """

    launch: Layout
    fits: bool
    compute_seconds: float
    within_seconds: float
    between_seconds: float
    seconds: float


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

    def estimate(self, launch: Layout) -> Estimate[Layout]:
        """Estimate the time of a step of a layout."""
        kind, m = GPUS[self.gpu], self.per_machine
        shards, replicas = launch.sent["all-gather"] + launch.sent["reduce-scatter"], launch.sent["all-reduce"]
        compute = launch.flops / (kind.peak_flops * kind.mfu)
        within = (shards * (launch.shards <= m) + replicas * (launch.gpus <= m)) / kind.intra_node_bandwidth
        rings = min(launch.shards, m) * (launch.gpus > m)  # between replicas
        between = (shards * (launch.shards > m) + replicas * rings) / self.bandwidth
        return Estimate(
            launch=launch, fits=launch.peak <= 0.9 * kind.memory, compute_seconds=compute, within_seconds=within,
            between_seconds=between, seconds=max(compute, within) + between,
        )  # fmt: skip


def enumerate_launches(
    config: TransformerConfig,
    training: TrainConfig,
    gpus: int,
    cluster: Cluster,
    replicas: int | None = None,
    rank: int | None = None,
) -> list[Estimate[Launch]]:
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
    settings = [
        replace(training, accumulate=parts, checkpoint_activations=saved)
        for parts in _divisors(max(1, training.batch_size // gpus))
        for saved in (False, True)
    ]
    uncompressed = [
        Launch(config=config, training=variant, gpus=gpus, replicas=count, kind=kind)
        for count in ([replicas] if replicas else _replicas(gpus, config.width, cluster.per_machine))
        for kind in get_args(Kind)[: 1 + (count < gpus)]  # equal for a single shard
        for variant in settings
    ]
    if rank is None:
        launches = [variant for launch in uncompressed for variant in (launch, *_compressed(launch))]
    elif replicas or not (
        launches := [replace(launch, rank=rank) for launch in uncompressed if launch.rank_problem(rank) is None]
    ):
        launches = [replace(launch, rank=rank) for launch in uncompressed]
    return sorted(map(cluster.estimate, launches), key=_sort_key)


def _sort_key(estimate: Estimate[Launch]) -> tuple[bool, float, int, int, float]:
    """Return the key: step time, or peak if the launch does not fit; ties by PowerSGD rank, micro-batches, peak."""
    launch, fits = estimate.launch, estimate.fits
    value = estimate.seconds if fits else launch.peak
    return not fits, value, launch.rank or 0, launch.training.accumulate, launch.peak


def _compressed(launch: Launch) -> list[Launch]:
    """Return the launch with the paper's rank, if that rank is possible."""
    rank = launch.shards * ceil(default_rank(launch.config.width) / launch.shards)
    return [] if launch.rank_problem(rank) else [replace(launch, rank=rank)]


def _replicas(gpus: int, width: int, m: int) -> list[int]:
    """Return the replica counts whose shards divide or fill machines, without empty matrix shards."""
    counts = [count for count in _divisors(gpus) if gpus // count <= width]
    return [count for count in counts if (s := gpus // count) % m == 0 or m % s == 0 or s == gpus]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def launch_command(launch: Launch, per_machine: int, recipe: str, defaults: TrainConfig) -> str:
    """Return the multi-line shell command; options equal to `defaults`, the recipe's training, are omitted."""
    training, machines = launch.training, ceil(launch.gpus / per_machine)
    lines = [f"limner train DATA --recipe {recipe} --out RUN --stages prior"]
    if launch.gpus > 1:
        processes = f"--nproc-per-node {launch.gpus}"
        if machines > 1:
            processes = (
                f"--nnodes {machines} --nproc-per-node {per_machine} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
            )
        compression = f" --grad-compression powersgd --grad-compression.rank {launch.rank}" if launch.rank else ""
        parallel = f"--parallel {launch.kind} --dp-replicate {launch.replicas}{compression}"
        lines = [f"torchrun {processes} -m", *lines, parallel]
    options = {
        "batch_size": f"batch-size {training.batch_size}",
        "accumulate": f"accumulate {training.accumulate}",
        "precision": f"precision {type(training.precision).__name__.lower()} "
        f"--prior.training.scaling {training.scaling}",
        "checkpoint_activations": f"{'' if training.checkpoint_activations else 'no-'}checkpoint-activations",
    }
    changed = [text for name, text in options.items() if getattr(training, name) != getattr(defaults, name)]
    lines += [" ".join(f"--prior.training.{text}" for text in changed)] * bool(changed)
    return " \\\n    ".join(lines)
