"""Text of `limner plan` on launches: a table of launches, the command for the best, and the results of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from limner.planner.cost import GB
from limner.planner.gpus import GPUS
from limner.planner.launch_search import LaunchEstimate, launch_command
from limner.recipes.recipe import PriorStage
from limner.text_table import render_table

if TYPE_CHECKING:
    from limner.planner.dry_run import DryRun

_MAX_LAUNCHES = 5


def gb(value: float) -> str:
    """Format bytes as GB (10^9 bytes)."""
    return f"{value / GB:,.2f}"


def launches(estimates: Sequence[LaunchEstimate], name: str, prior: PriorStage) -> Iterable[str]:
    """Yield blocks of text: the launches, then the best command or the least memory. `prior` is recipe `name`'s."""
    best, cluster = estimates[0], estimates[0].cluster
    rows = [
        (
            f"{timed.launch.shards} shards x {timed.launch.replicas}" + ", zero2" * (timed.launch.kind == "zero2"),
            str(timed.launch.training.accumulate),
            "yes" if timed.launch.training.checkpoint_activations else "no",
            str(timed.launch.rank or "-"),
            gb(timed.launch.peak),
            *(f"{t:,.3f}" for t in (timed.compute_seconds, timed.within_seconds, timed.between_seconds, timed.seconds)),
        )
        for timed in [timed for timed in estimates if timed.fits == best.fits][:_MAX_LAUNCHES]
    ]
    head = (
        *("launches", "micro-batches", "checkpointed", "rank", "GB per GPU"),
        *("computing, s", "within machines", "between", "per step"),
    )
    yield render_table(head, rows) + (
        f"\ntraffic within machines overlaps computation; a machine sends {cluster.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    )
    if best.fits:
        command = launch_command(best, name, prior.training, prior.grad_compression_rank)
        yield f"the fastest that fits:\n\n{command}"
        return
    launch, memory = best.launch, GPUS[cluster.gpu].memory
    yield (
        f"no launch fits into 90% of a {cluster.gpu}'s {gb(memory)} GB, the smallest takes {gb(launch.peak)} GB: "
        "use more GPUs, or GPUs with more memory"
    )


def dry_run_report(timed: LaunchEstimate, measured: DryRun) -> Iterable[str]:
    """Yield a block of text: memory and traffic of rank 0, calculated and from the dry run, and its shards' shapes."""
    launch = timed.launch.uncompressed
    calculated = {
        **{name: launch.state[name] for name in measured.state},
        "activations of a micro-batch": sum(launch.activations.values()),
        "peak": launch.peak,
    }
    by_dry_run = {**measured.state, "activations of a micro-batch": measured.activations, "peak": measured.peak}
    yield render_table(
        (f"rank 0 of {launch.gpus:,}, uncompressed", "calculated", "dry run"),
        [
            *((f"{name}, MB", _mb(calculated[name]), _mb(value)) for name, value in by_dry_run.items()),
            *((f"{name}, calls", f"{n:,}", f"{measured.calls[name]:,}") for name, n in launch.calls.items()),
            *((f"{name}, MB sent", _mb(n), _mb(measured.sent[name])) for name, n in launch.sent.items()),
        ],
    )
    shown = {name: shapes for name, shapes in measured.shards.items() if not name.startswith("blocks.")}
    shown |= {name: shapes for name, shapes in measured.shards.items() if name.startswith("blocks.0.")}
    text = render_table(
        ("shapes of a block and of the rest", "full", "shard"),
        [(name, *(" x ".join(map(str, shape)) for shape in shapes)) for name, shapes in shown.items()],
    )
    if launch.uneven:
        first = launch.uneven[0]
        text += (
            f"\n{launch.shards} shards do not divide {len(launch.uneven)} of these evenly, such as {first}: "
            "the last shards are shorter, and are padded"
        )
    yield text


def _mb(value: float) -> str:
    return f"{value / 1e6:,.1f}"
