"""`limner plan`: estimates of memory, time and traffic to train a recipe's prior, and the launch command. No GPU is
needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from limner import recipes
from limner.cli import validate_choice
from limner.cli.arguments import parse
from limner.numerics.precision import Bf16
from limner.planner import cost
from limner.planner.cost import GB
from limner.planner.gpus import GPUS
from limner.planner.launch import Launch
from limner.planner.launch_search import Cluster, LaunchEstimate, compressed, enumerate_launches, launch_command
from limner.planner.pipeline_costs import peak_bytes, pipelines
from limner.planner.pipeline_search import PipelineEstimate
from limner.quantization.precisions import Fp16Weights
from limner.recipes.recipe import PriorStage
from limner.text_table import render_table
from limner.validation import Range, Validated

if TYPE_CHECKING:
    from limner.planner.dry_run import DryRun

_MAX_LAUNCHES = 5
RUNS = """\
limner trains on one GPU, or with torchrun on many. There it shards parameters over groups of GPUs (--parallel fsdp;
with zero2, parameters are unsharded between forward and backward pass), and averages gradients between the replicas,
in fp32 or compressed by PowerSGD.
The columns "fp32": weights and gradients in fp32, matrix products in bf16, or fp16 on GPUs without bf16. The columns
"16-bit (App. D)": --prior.training.precision fp16weights, the default from dalle-3b on, stores the matrices of the
blocks and their gradients in 16 bits, and PowerSGD compresses gradients between machines. "checkpointed" recomputes
activations. AdamW16 stores moments in the paper's 16-bit formats. Optimizer and averages are those of the recipe."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Validated):
    """Estimate parameters, memory, FLOPs, communication and time of a recipe's prior on a cluster.

    The tables are for the paper's layout, a copy of the parameters on each machine. The launches compare all layouts
    that `torchrun` can start, with the best command.
    """

    recipe: Annotated[str, arg(metavar="NAME")] = "dalle-12b"
    """Name of a recipe."""
    gpus: Annotated[int, Range(1, 10**7)] = 1_024
    """Number of GPUs."""
    gpu: Annotated[str, arg(metavar="NAME")] = "v100-16gb"
    """One of v100-16gb, a100-80gb, h100-80gb, h200-141gb."""
    batch: Annotated[int | None, Range(1, 2**20)] = None
    """Samples per step, over all GPUs; the recipe's by default."""
    per_machine: Annotated[int, Range(1, 10**5)] = 8
    """GPUs per machine; a machine's copy of the parameters is sharded over them."""
    rank: Annotated[int | None, Range(1, 10**6)] = None
    """Rank of PowerSGD over all shards; the paper's by default (Table 1)."""
    link: Annotated[float | None, Range(1e-3, 1e9)] = None
    """Bandwidth between machines in Mbit/s; by default typical for the GPU."""
    dp_replicate: Annotated[int | None, Range(1, 10**7)] = None
    """Replicas of the sharded parameters; the fastest number that fits by default."""
    dry_run: bool = False
    """Also run a step of the launch in this process on meta tensors: seconds for a small model, minutes for the
    largest."""
    candidates: Annotated[int, Range(1, 10**6)] = 512
    """Candidates of one caption, for the memory of sampling."""


def main(argv: Sequence[str]) -> None:
    """Print estimates, launches and the best command."""
    options = parse(PlanOptions, argv, "limner plan")
    validate_choice(options.gpu, list(GPUS), "GPU")
    prior = recipes.get(options.recipe).prior
    training = prior.training if options.batch is None else replace(prior.training, batch_size=options.batch)
    link = None if options.link is None else options.link * 1e6 / 8
    cluster = Cluster(gpu=options.gpu, per_machine=min(options.per_machine, options.gpus), link=link)
    estimates = enumerate_launches(prior.model, training, options.gpus, cluster, options.dp_replicate, options.rank)
    replicas = options.gpus // gcd(options.gpus, cluster.per_machine)
    layout = Launch(config=prior.model, training=replace(training, accumulate=1), gpus=options.gpus, replicas=replicas)
    found = pipelines(layout, cluster)
    blocks = [
        *model_tables(options.recipe, layout, cluster, options.candidates),
        *layout_tables(layout, cluster, options.rank),
        *launch_table(estimates, options.recipe, prior),
        pipeline_table(layout, cluster, found),
    ]
    if options.dry_run:
        from limner.planner.dry_run import dry_run

        blocks += dry_run_table(estimates[0], dry_run(estimates[0].launch))
    print("\n\n".join([*blocks, *pipeline_choice(layout, found, estimates[0]), RUNS]))


def model_tables(name: str, layout: Launch, cluster: Cluster, candidates: int) -> Iterable[str]:
    """Yield the tables of the model and of sampling as blocks of text."""
    c, (h, w), samples = layout.config, layout.config.grid, layout.activations.samples
    yield (
        f"{name}: {c.depth} layers, {c.heads} heads of {c.width // c.heads}, width {c.width:,}; {c.text_len} text and "
        f"{h} x {w} image tokens\n{layout.gpus:,} x {cluster.gpu}, {cluster.per_machine} per machine, "
        f"{samples} sample{'s' * (samples > 1)} per GPU"
    )
    counts = cost.count_parameters(c)
    totals = {"all": counts.total(), "effective, 12 n_layer d_model^2": cost.effective_parameters(c)}
    yield render_table(("parameters", ""), [(kind, f"{n:,}") for kind, n in {**counts, **totals}.items()])
    (prefix, candidate), (_, dense) = cost.kv_cache(c), cost.kv_cache(c, dense=True)
    sizes = {
        "a caption's text, shared": prefix,
        "each candidate": candidate,
        "each candidate, dense": dense,
        f"a caption with {candidates} candidates": prefix + candidates * candidate,
        "the same, dense": candidates * dense,
    }
    yield render_table(("cache when sampling", "MB"), [(kind, _mb(n)) for kind, n in sizes.items()])


def layout_tables(layout: Launch, cluster: Cluster, rank: int | None) -> Iterable[str]:
    """Yield the tables of the paper's layout, with PowerSGD of `rank` or the paper's, as blocks of text."""
    c, gpu, steps = layout.config, GPUS[cluster.gpu], layout.training.steps
    packed = compressed(layout, rank) or layout
    saved = [replace(layout.training, checkpoint_activations=on) for on in (False, True)]
    cases = [
        replace(launch, training=replace(training, precision=precision, scaling=scaling))
        for launch, precision, scaling in ((layout, Bf16(), "none"), (packed, Fp16Weights(), "resblocks"))
        for training in saved
    ]
    parts = [
        {
            **launch.state, **launch.activations.stored, "gathered between the passes": launch.retained_bytes,
            "logits": launch.activations.logits, "one layer at work": launch.activations.workspace,
        }
        for launch in cases
    ]  # fmt: skip
    names = dict.fromkeys(name for sizes in parts for name in sizes)
    rows = [(name, *(_gb(sizes[name]) if name in sizes else "" for sizes in parts)) for name in names]
    verdicts = ("fits" if launch.peak <= gpu.memory else "too large" for launch in cases)
    yield render_table(
        (f"memory per GPU, GB of {gpu.memory / GB:.1f}", "fp32", "checkpointed", "16-bit (App. D)", "checkpointed"),
        [*rows, ("peak", *(_gb(launch.peak) for launch in cases)), ("", *verdicts)],
    )
    flops = (cost.training_flops(c, layout.training.batch_size, on) for on in (False, True))
    traffic = (_gb(replace(packed, training=training).memory_traffic) for training in saved)
    yield render_table(
        ("per step", "", "checkpointed"),
        [("PFLOP, all GPUs", *(f"{n / 1e15:,.3g}" for n in flops)), ("GB read and written per GPU", *traffic)],
    )
    sent = {
        "within its machine": layout.sent["all-gather"] + layout.sent["reduce-scatter"],
        "between machines": layout.sent["all-reduce"],
    }
    if packed.rank:
        sent[f"the same, compressed to rank {packed.rank}"] = packed.sent["all-reduce"]
    yield render_table(("a GPU sends, GB per step", ""), [(kind, _gb(n)) for kind, n in sent.items()])
    r, m = rank or cost.default_rank(c.width), layout.shards
    yield (
        render_table(
            ("compression of a layer, values", "gradient shard", "P", "Q"),
            [(kind, *(f"{n:,.0f}" for n in row)) for kind, row in cost.table2(c.width, r, m).items()],
        )
        + f"\nsaved: {cost.compression_rate(c.width, r, m):.1%} (Table 2: 1 - r (m + 2) / (2 d m))"
    )
    yield render_table(
        ("Table 1: effective parameters", "d_model", "rank", "saved"),
        [(f"{n / 1e9:.2f} billion", f"{d:,}", str(r), f"{share:.0%}") for n, d, r, share in cost.table1()],
    )
    times = []
    for name, kind in GPUS.items():
        launches = (replace(launch, training=saved[True]) for launch in (layout, packed))
        usual = Cluster(gpu=name, per_machine=cluster.per_machine)
        seconds = [LaunchEstimate(launch=launch, cluster=usual).seconds for launch in launches]
        days = (f"{t:,.2f} s, {t * steps / 86_400:,.3g} days" for t in seconds)
        times.append((name, f"{kind.mfu:.0%} of {kind.peak_flops / 1e12:,.0f} TFLOP/s", *days))
    yield render_table((f"{steps:,} steps, checkpointed", "assumed", "uncompressed", "compressed"), times)


def launch_table(estimates: Sequence[LaunchEstimate], name: str, prior: PriorStage) -> Iterable[str]:
    """Yield blocks of text: the launches, then the best command or the least memory. `prior` is recipe `name`'s."""
    best, cluster = estimates[0], estimates[0].cluster
    rows = [
        (
            f"{timed.launch.shards} shards x {timed.launch.replicas}" + ", zero2" * (timed.launch.kind == "zero2"),
            str(timed.launch.training.accumulate),
            "yes" if timed.launch.training.checkpoint_activations else "no",
            str(timed.launch.rank or "-"),
            _gb(timed.launch.peak),
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
        f"no launch fits into 90% of a {cluster.gpu}'s {_gb(memory)} GB, the smallest takes {_gb(launch.peak)} GB: "
        "use more GPUs, or GPUs with more memory"
    )


def pipeline_table(layout: Launch, cluster: Cluster, found: Sequence[PipelineEstimate]) -> str:
    """Return the table of pipelines with all weights of a stage on its GPU."""
    rows = []
    for estimate in found:
        settings, peaks = estimate.settings, peak_bytes(layout, estimate)
        rows.append(
            (
                f"{settings.devices} stages x {settings.replicas}", str(settings.microbatches),
                f"{estimate.simulated.bubble:.0%}", _gb(peaks[0]), _gb(max(peaks)), f"{estimate.seconds:,.3f}",
                "fits" if cluster.holds(max(peaks)) else "too large",
            )
        )  # fmt: skip
    if not rows:
        return (
            "no pipelines: a pipeline takes at least two GPUs of a machine, and a batch that its micro-batches divide"
        )
    head = ("pipelines, 1F1B", "micro-batches", "bubble", "GB, first GPU", "GB, largest", "s per step", "")
    return (
        render_table(head, rows)
        + "\nstages are resblocks in the recipe's format, unsharded; replicas average gradients"
    )


def pipeline_choice(layout: Launch, found: Sequence[PipelineEstimate], best: LaunchEstimate) -> Iterable[str]:
    """Yield a block of text if a pipeline can run: options of the fastest, and its time over the best launch's."""
    cluster, depth = best.cluster, layout.config.depth
    possible = [x for x in found if x.settings.devices <= depth and cluster.holds(max(peak_bytes(layout, x)))]
    if not possible:
        return
    if best.launch.training.scaling != "none":
        yield "The best launch scales gradients, which a pipeline (--parallel pipeline) does not support."
        return
    ratio = f"a step takes {possible[0].seconds / best.seconds:.2f} times as long as with the best launch"
    yield (
        f"With --parallel pipeline --pipeline-stages {possible[0].settings.devices}, each GPU holds some blocks of the "
        f"prior instead of shards:\n{ratio if best.fits else 'no launch fits, this pipeline does'}."
    )


def dry_run_table(timed: LaunchEstimate, measured: DryRun) -> Iterable[str]:
    """Yield a block of text: memory and traffic of rank 0, calculated and from the dry run, and its shards' shapes."""
    launch = timed.launch.uncompressed
    yield render_table(
        (f"rank 0 of {launch.gpus:,}, uncompressed", "calculated", "dry run"),
        [
            *((f"{name}, MB", _mb(launch.sizes[name]), _mb(value)) for name, value in measured.sizes.items()),
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


def _gb(value: float) -> str:
    return f"{value / GB:,.2f}"


def _mb(value: float) -> str:
    return f"{value / 1e6:,.1f}"
