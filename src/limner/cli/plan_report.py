"""Text of `limner plan` on launches: a table of launches, the command for the best, and the results of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from limner.profiling.cost import GB
from limner.profiling.gpus import GPUS
from limner.profiling.launch_search import LaunchEstimate, launch_command
from limner.text_table import figures
from limner.training.config import TrainConfig

if TYPE_CHECKING:
    from limner.profiling.dry_run import DryRun

_SHOWN = 5


def gb(value: float) -> str:
    """Format bytes as GB (10^9 bytes)."""
    return f"{value / GB:,.2f}"


def launches(found: Sequence[LaunchEstimate], recipe: str, before: TrainConfig) -> Iterable[str]:
    """Yield blocks of text: the launches, then the best command or the least memory. `before`: the recipe's config."""
    best, cluster = found[0], found[0].cluster
    rows = [
        (
            f"{timed.launch.shards} shards x {timed.launch.replicas}" + ", zero2" * (timed.launch.kind == "zero2"),
            str(timed.launch.training.accumulate),
            "yes" if timed.launch.training.checkpoint_activations else "no",
            str(timed.launch.rank or "-"),
            gb(timed.launch.peak),
            *(f"{t:,.3f}" for t in (timed.compute_seconds, timed.within_seconds, timed.between_seconds, timed.seconds)),
        )
        for timed in [timed for timed in found if timed.fits == best.fits][:_SHOWN]
    ]
    head = (
        *("launches", "micro-batches", "checkpointed", "rank", "GB per GPU"),
        *("computing, s", "within machines", "between", "per step"),
    )
    yield figures(head, rows) + (
        f"\ncomputing hides what is sent within machines; a machine sends {cluster.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    )
    if best.fits:
        yield f"the quickest that fits:\n\n{launch_command(best, recipe, before)}"
        return
    launch, memory = best.launch, GPUS[cluster.gpu].memory
    yield (
        f"no launch fits into nine tenths of a {cluster.gpu}'s {gb(memory)} GB: the least is {gb(launch.peak)} GB; "
        "take more GPUs, or some with more memory"
    )


def tried(timed: LaunchEstimate, trial: DryRun) -> Iterable[str]:
    """Yield a block of text: memory and traffic of rank 0, calculated and from the dry run, and its shards' shapes."""
    launch = timed.launch.uncompressed
    calculated = {
        **{name: launch.state[name] for name in trial.state},
        "activations of a micro-batch": sum(launch.activations.values()),
        "peak": launch.peak,
    }
    counted = {**trial.state, "activations of a micro-batch": trial.activations, "peak": trial.peak}
    yield figures(
        (f"tried as the first of {launch.gpus:,} ranks, uncompressed", "calculated", "tried"),
        [
            *((f"{name}, MB", _mb(calculated[name]), _mb(value)) for name, value in counted.items()),
            *((f"{name}, calls", f"{n:,}", f"{trial.calls[name]:,}") for name, n in launch.calls.items()),
            *((f"{name}, MB sent", _mb(n), _mb(trial.sent[name])) for name, n in launch.sent.items()),
        ],
    )
    shown = {name: shapes for name, shapes in trial.shards.items() if not name.startswith("blocks.")}
    shown |= {name: shapes for name, shapes in trial.shards.items() if name.startswith("blocks.0.")}
    text = figures(
        ("shapes of a block and of the rest", "whole", "a shard"),
        [(name, *(" x ".join(map(str, shape)) for shape in shapes)) for name, shapes in shown.items()],
    )
    if launch.uneven:
        first = launch.uneven[0]
        text += (
            f"\n{launch.shards} shards do not divide {len(launch.uneven)} of these evenly, {first} the first: "
            "its last shards are shorter, and are padded"
        )
    yield text


def _mb(value: float) -> str:
    return f"{value / 1e6:,.1f}"
