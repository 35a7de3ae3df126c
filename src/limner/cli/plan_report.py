"""Text of `limner plan`: tables of the paper's layout and of launches, the best command, results of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from limner.planner.cost import GB, count_parameters
from limner.planner.launch import Launch
from limner.planner.launch_search import GPUS, Cluster, Estimate, launch_command
from limner.planner.paper_layout import PaperLayout, compression_rate, table1, table2
from limner.text_table import render_table
from limner.training.config import TrainConfig

if TYPE_CHECKING:
    from limner.planner.dry_run import DryRun

_MAX_LAUNCHES = 5


def paper_report(name: str, layout: PaperLayout, gpu: str, steps: int, candidates: int) -> Iterable[str]:
    """Yield the tables of the paper's layout as blocks of text."""
    c, m, cost = layout.config, layout.shards, layout.cost
    h, w = c.grid
    yield (
        f"{name}: {c.depth} layers, {c.heads} heads of {c.width // c.heads}, width {c.width:,}; {c.text_len} text and "
        f"{h} x {w} image tokens\n{layout.gpus:,} x {gpu}, {m} per machine, "
        f"{cost.samples} sample{'s' * (cost.samples > 1)} per GPU"
    )
    counts = count_parameters(c)
    totals = {"all": counts.total(), "effective, 12 n_layer d_model^2": cost.effective_parameters}
    yield render_table(("parameters", ""), [(kind, f"{n:,}") for kind, n in {**counts, **totals}.items()])
    yield _memory_table(layout, gpu)

    (prefix, candidate), (_, dense) = cost.kv_cache(), cost.kv_cache(dense=True)
    caches = {
        "a caption's text, shared": prefix,
        "each candidate": candidate,
        "each candidate, dense": dense,
        f"a caption with {candidates} candidates": prefix + candidates * candidate,
        "the same, dense": candidates * dense,
    }
    yield render_table(("cache when sampling", "MB"), [(kind, _mb(size)) for kind, size in caches.items()])

    passes = [replace(layout, half=True, checkpointing=saved) for saved in (False, True)]
    yield render_table(
        ("per step", "", "checkpointed"),
        [
            ("PFLOP, all GPUs", *(f"{x.flops * x.gpus / 1e15:,.3g}" for x in passes)),
            ("GB read and written per GPU", *(_gb(x.memory_traffic) for x in passes)),
        ],
    )
    uncompressed, rank = replace(layout, rank=None), layout.rank or 0
    sent = {
        "within its machine": layout.sent["all-gather"] + layout.sent["reduce-scatter"],
        "between machines": uncompressed.sent["all-reduce"],
        f"the same, compressed to rank {rank}": layout.sent["all-reduce"],
    }
    yield render_table(("a GPU sends, GB per step", ""), [(kind, _gb(size)) for kind, size in sent.items()])
    yield (
        render_table(
            ("compression of a layer, values", "gradient shard", "P", "Q"),
            [(kind, *(f"{n:,.0f}" for n in row)) for kind, row in table2(c.width, rank, m).items()],
        )
        + f"\nsaved: {compression_rate(c.width, rank, m):.1%} (Table 2: 1 - r (m + 2) / (2 d m))"
    )
    yield render_table(
        ("Table 1: effective parameters", "d_model", "rank", "saved"),
        [(f"{n / 1e9:.2f} billion", f"{d:,}", str(r), f"{saved:.0%}") for n, d, r, saved in table1()],
    )
    times = []
    for name, kind in GPUS.items():
        cluster = Cluster(gpu=name, per_machine=m)
        seconds = [cluster.estimate(replace(x, checkpointing=True)).seconds for x in (uncompressed, layout)]
        days = (f"{t:,.2f} s, {t * steps / 86_400:,.3g} days" for t in seconds)
        times.append((name, f"{kind.mfu:.0%} of {kind.peak_flops / 1e12:,.0f} TFLOP/s", *days))
    yield render_table((f"{steps:,} steps, checkpointed", "assumed", "uncompressed", "compressed"), times)


def _memory_table(layout: PaperLayout, gpu: str) -> str:
    """Return the memory of a GPU with fp32 and 16-bit storage, without and with checkpointing."""
    memory = GPUS[gpu].memory
    layouts = [replace(layout, half=half, checkpointing=saved) for half in (False, True) for saved in (False, True)]
    parts = [{**x.state, **x.activations, "one layer at work": x.workspace} for x in layouts]
    rows = [
        (name, *(_gb(sizes[name]) if name in sizes else "" for sizes in parts))
        for name in dict.fromkeys(name for sizes in parts for name in sizes)
    ]
    verdicts = ("fits" if x.peak <= memory else "too large" for x in layouts)
    return render_table(
        (f"memory per GPU, GB of {memory / GB:.1f}", "fp32", "checkpointed", "16-bit (App. D)", "checkpointed"),
        [*rows, ("peak", *(_gb(x.peak) for x in layouts)), ("", *verdicts)],
    )


def launches(
    estimates: Sequence[Estimate[Launch]], cluster: Cluster, recipe: str, before: TrainConfig
) -> Iterable[str]:
    """Yield blocks of text: the launches, then the best command or the least memory. `before`: the recipe's config."""
    best = estimates[0]
    rows = []
    for timed in [timed for timed in estimates if timed.fits == best.fits][:_MAX_LAUNCHES]:
        launch, training = timed.launch, timed.launch.training
        seconds = timed.compute_seconds, timed.within_seconds, timed.between_seconds, timed.seconds
        rows.append(
            (
                f"{launch.shards} shards x {launch.replicas}" + ", zero2" * (launch.kind == "zero2"),
                *(training.accumulate, "yes" if training.checkpoint_activations else "no", launch.rank or "-"),
                *(_gb(launch.peak), *(f"{t:,.3f}" for t in seconds)),
            )
        )
    head = (
        *("launches", "micro-batches", "checkpointed", "rank", "GB per GPU"),
        *("computing, s", "within machines", "between", "per step"),
    )
    yield render_table(head, rows) + (
        f"\ntraffic within machines overlaps computation; a machine sends {cluster.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    )
    if best.fits:
        yield f"the fastest that fits:\n\n{launch_command(best.launch, cluster.per_machine, recipe, before)}"
        return
    yield (
        f"no launch fits into 90% of a {cluster.gpu}'s {_gb(GPUS[cluster.gpu].memory)} GB, the smallest takes "
        f"{_gb(best.launch.peak)} GB: use more GPUs, or GPUs with more memory"
    )


def dry_run_report(launch: Launch, measured: DryRun) -> Iterable[str]:
    """Yield a block of text: memory, traffic and FLOPs of rank 0, calculated and from the dry run, and its shards'
    shapes."""
    step, activations = measured.step, "activations of a micro-batch"
    calculated = {**launch.state, activations: sum(launch.activations.values()), "peak": launch.peak}
    sizes = {**step.state, activations: step.activations, "peak": step.peak}
    yield render_table(
        (f"rank 0 of {launch.gpus:,}, uncompressed", "calculated", "dry run"),
        [
            *((f"{name}, MB", _mb(calculated[name]), _mb(size)) for name, size in sizes.items()),
            *((f"{name}, calls", f"{n:,}", f"{step.calls[name]:,}") for name, n in launch.calls.items()),
            *((f"{name}, MB sent", _mb(n), _mb(step.sent[name])) for name, n in launch.sent.items()),
            ("TFLOP", *(f"{n / 1e12:,.3g}" for n in (launch.flops, measured.flops))),
        ],
    )
    rows = [
        (name, *(" x ".join(map(str, shape)) for shape in shapes))
        for inside in (False, True)  # parameters outside the blocks first
        for name, shapes in measured.shards.items()
        if name.startswith("blocks.0." if inside else "") and name.startswith("blocks.") == inside
    ]
    text = render_table(("shapes of a block and of the rest", "full", "shard"), rows)
    if launch.uneven:
        text += (
            f"\n{launch.shards} shards do not divide {len(launch.uneven)} of these evenly, such as {launch.uneven[0]}: "
            "the last shards are shorter, and are padded"
        )
    yield text


def _gb(value: float) -> str:
    return f"{value / GB:,.2f}"


def _mb(value: float) -> str:
    return f"{value / 1e6:,.1f}"
