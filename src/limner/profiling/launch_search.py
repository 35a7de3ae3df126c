"""Which launch to choose for a number of GPUs: shards, of weights or only of the rest (zero2), replicas, micro-batches,
checkpointing and PowerSGD's rank.

Every way to divide the GPUs is calculated (`launch.py`), and the ones that fit into memory are ordered by the time of a
step. As elsewhere in the plan, arithmetic and the traffic within machines go on together (Figure 5 of Ramesh et al.
2021), and the traffic between machines comes on top.

How bytes reach the wire, when ranks are numbered machine by machine: a ring of S ranks crosses the link of a machine
once, if S ranks are more than a machine has. Between replicas each shard has a ring of its own, so a machine's link
carries min(S, M) of them, for M GPUs in a machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import get_args

from limner.layers.precisions import Bf16Weights, Fp16Weights
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.profiling.compression import default_rank
from limner.profiling.gpus import GPUS
from limner.profiling.launch import Kind, Launch
from limner.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines with `per_machine` GPUs of a kind in `GPUS` each. `link` is what a machine exchanges with the others, in
    bytes/s; by default what is usual for the kind."""

    gpu: str
    per_machine: int = 8
    link: float | None = None

    @property
    def between(self) -> float:
        """Bytes/s between a machine and the others."""
        return GPUS[self.gpu].between * self.per_machine if self.link is None else self.link


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A launch on a cluster. Seconds per step."""

    launch: Launch
    cluster: Cluster

    @property
    def fits(self) -> bool:
        """Into nine tenths of the memory: the plan may be wrong by a tenth, and a GPU's drivers need some."""
        return self.launch.peak <= 0.9 * GPUS[self.cluster.gpu].memory

    @property
    def computing(self) -> float:
        kind = GPUS[self.cluster.gpu]
        return self.launch.flops / (kind.rate * kind.share)

    @property
    def within(self) -> float:
        """Traffic within machines."""
        return self._sent(across=False) / GPUS[self.cluster.gpu].within

    @property
    def between(self) -> float:
        """Traffic between machines."""
        return self._sent(across=True) / self.cluster.between

    @property
    def seconds(self) -> float:
        return max(self.computing, self.within) + self.between

    def _sent(self, across: bool) -> float:
        """Bytes: through the link of a machine, or of a GPU within its machine."""
        launch, m = self.launch, min(self.cluster.per_machine, self.launch.gpus)
        sharing = launch.sent["all-gather"] + launch.sent["reduce-scatter"]
        reducing = launch.sent["all-reduce"]
        crossed = launch.shards > m, launch.gpus > m  # by rings of shards, and of replicas
        if across:
            return sharing * crossed[0] + reducing * min(launch.shards, m) * crossed[1]
        return sharing * (not crossed[0]) + reducing * (not crossed[1])


def choices(
    config: TransformerConfig,
    training: TrainConfig,
    gpus: int,
    cluster: Cluster,
    replicas: int | None = None,
    rank: int | None = None,
) -> list[Timed]:
    """All launches of a prior on so many GPUs, those that fit first, then the quickest first.

    On GPUs without bf16 products are in fp16, with the paper's scale for each resblock: bf16 would be slower than
    fp32 there.

    Args:
        replicas, rank: only with these; by default all numbers, and the paper's rank (Table 1) beside none.

    Raises `UserError` where no launch is possible, as the numbers do not divide.
    """
    if not GPUS[cluster.gpu].bf16 and isinstance(training.precision, Auto | Bf16):
        stored = isinstance(training.precision, Bf16Weights)
        training = replace(training, precision=Fp16Weights() if stored else Fp16(), scaling="resblocks")
    made = [
        Launch(
            config=config,
            training=replace(training, accumulate=parts, checkpoint_activations=saved),
            gpus=gpus,
            replicas=count,
            kind=kind,
        )
        for count in ([replicas] if replicas else _replicas(gpus, config.width, cluster.per_machine))
        for kind in get_args(Kind)[: 1 + (count < gpus)]  # without shards they are the same
        for parts in _divisors(max(1, training.batch_size // gpus))
        for saved in (False, True)
    ]
    if rank is None:
        launches = [each for launch in made for each in (launch, *_compressed(launch))]
    elif replicas or not (launches := [replace(launch, rank=rank) for launch in made if launch.refuses(rank) is None]):
        launches = [replace(launch, rank=rank) for launch in made]
    return sorted((Timed(launch=launch, cluster=cluster) for launch in launches), key=_order)


def _order(timed: Timed) -> tuple[bool, float, int, int, float]:
    """Among launches that take as long: without PowerSGD, in few micro-batches, with less memory. Of those that do not
    fit, what takes least."""
    launch, fits = timed.launch, timed.fits
    parts = launch.training.accumulate
    return not fits, timed.seconds if fits else launch.peak, launch.rank or 0, parts, launch.peak


def _compressed(launch: Launch) -> list[Launch]:
    """It with the paper's rank, where that is possible."""
    usual = launch.shards * ceil(default_rank(launch.config.width) / launch.shards)
    return [] if launch.refuses(usual) else [replace(launch, rank=usual)]


def _replicas(gpus: int, width: int, m: int) -> list[int]:
    """Such that shards fill machines, or machines are filled with them, and no shard of a matrix is empty."""
    counts = [count for count in _divisors(gpus) if gpus // count <= width]
    return [count for count in counts if (s := gpus // count) % m == 0 or m % s == 0 or s == gpus]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def command(timed: Timed, recipe: str, before: TrainConfig) -> str:
    """How to start it, over lines; `before` is the recipe's own training."""
    launch, m = timed.launch, timed.cluster.per_machine
    training, machines = launch.training, ceil(launch.gpus / m)
    if launch.gpus == 1:
        words = [f"limner train DATA --recipe {recipe} --out RUN --stages prior"]
    else:
        where = (
            f"torchrun --nproc-per-node {launch.gpus}"
            if machines == 1
            else f"torchrun --nnodes {machines} --nproc-per-node {m} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
        )
        words = [
            f"{where} -m",
            f"limner train DATA --recipe {recipe} --out RUN --stages prior",
            f"--parallel {launch.kind} --replicas {launch.replicas}"
            + (f" --reduce powersgd --reduce.rank {launch.rank}" if launch.rank else ""),
        ]
    changed = [
        f"--prior.training.{name.replace('_', '-')} {value}"
        for name in ("batch_size", "accumulate")
        if (value := getattr(training, name)) != getattr(before, name)
    ]
    if training.precision != before.precision:
        word = type(training.precision).__name__.lower()
        changed.append(f"--prior.training.precision {word} --prior.training.scaling {training.scaling}")
    if training.checkpoint_activations != before.checkpoint_activations:
        changed.append(f"--prior.training.{'' if training.checkpoint_activations else 'no-'}checkpoint-activations")
    return " \\\n    ".join([*words, *([" ".join(changed)] if changed else [])])
