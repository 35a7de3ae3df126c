"""`limner inspect precision | spikes | underflow | graph`: kernels of a run, loss spikes, gradient underflow by format,
and the autograd graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from tyro.conf import Positional, arg

from limner.atomic_io import atomic_write_text
from limner.cli import run_subcommand
from limner.cli.arguments import OutputFile
from limner.config import from_dict, load_json
from limner.errors import UserError, escape_control
from limner.json_files import read_json
from limner.text_table import render_table
from limner.validation import SEEDS, Range, Validated

if TYPE_CHECKING:
    from limner.planner.saved_tensors import TrainingStep
    from limner.quantization.products import Counts


def main(argv: Sequence[str]) -> None:
    """Run a subcommand of `limner inspect`."""
    run_subcommand("limner inspect", (precision, spikes, underflow, graph), argv)


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Show the format of stored weights for each linear layer of a model, and for 8-bit layers the kernels of each
    matrix product with their counts. Products of other layers use torch's kernels and are not counted.

    If a kernel does not support a product, a fallback computes it: a table's last line gives count and reasons.
    Counts include evaluations during training and recomputation by checkpointing.
    """

    run: Positional[Path]
    """A run of `limner train`, or the folder of one of its stages."""


def precision(options: PrecisionOptions) -> None:
    """show the formats of weights, and the kernels of 8-bit layers with their counts"""
    from limner.training.kernel_report import FILE

    run = options.run
    if not any((run / name).exists() for name in ("recipe.json", "config.json", FILE)):
        raise UserError(f"{run} is not a run folder: name the --out folder of `limner train`")
    if not (files := _records(run, FILE)):
        raise UserError(
            f"{run} lacks records of low-precision layers: train with --prior.training.precision switchback or "
            "fp16weights, for example; each checkpoint writes the record"
        )
    print("\n\n".join("\n".join(_precision_lines(title or "run", path)) for title, path in files.items()))


@dataclass(frozen=True, kw_only=True)
class SpikesOptions:
    """Find loss spikes of a run, and the matrices that predict them: their RMS_t spikes 1 to 8 steps earlier
    (Wortsman et al. 2023)."""

    run: Positional[Path]
    """A run of `limner train`, or the folder of one of its stages, such as runs/mine/prior."""
    output: OutputFile = None
    """Write a page with the curves of one stage."""


def spikes(options: SpikesOptions) -> None:
    """did RMS_t predict the spikes of the loss?"""
    from limner.evaluation.loss_spikes import STABILITY_FILE, spike_report

    stages = _records(options.run, STABILITY_FILE) or {"": options.run / STABILITY_FILE}
    folder = next(iter(stages.values())).parent
    if options.output and len(stages) > 1:
        raise UserError(f"{options.run} has several stages: name one for a page, such as {folder}")
    reports = {title: spike_report(path.parent) for title, path in stages.items()}
    print("\n\n".join((f"{title}: " if title else "") + report.text() for title, report in reports.items()))
    if options.output:
        page = next(iter(reports.values())).save(options.output, f"Spikes of {folder}")
        print(f"written: {escape_control(page)}")


@dataclass(frozen=True, kw_only=True)
class UnderflowOptions(Validated):
    """Count exponents of the gradients of one batch per resblock, and the share that underflows in each format."""

    run: Positional[Path]
    """The folder of a run."""
    data: Positional[str]
    """Training data of the run."""
    stage: Literal["prior", "contrastive"] = "prior"
    """Stage whose model is inspected."""
    scale: Annotated[float, Range(1e-12, 2**40)] = 1.0
    """Factor on gradients before rounding; the scale of a resblock starts at 8192."""
    seed: Annotated[int, SEEDS] = 0
    """Seed of the batch."""
    output: OutputFile = None
    """Write a page with the histograms of the exponents."""


def underflow(options: UnderflowOptions) -> None:
    """what share of the gradients would underflow?"""
    recipe = options.run / "recipe.json"
    if not recipe.exists():
        raise UserError(f"{options.run} lacks recipe.json: name the --out folder of `limner train`")
    from limner.data.stream import Stream
    from limner.planner.grad_histogram import SMALLEST_SUBNORMAL, gradient_exponents
    from limner.quantization.low_precision import to_linear
    from limner.recipes.recipe import Recipe
    from limner.runs.run_data import RunData
    from limner.runs.stages import restore

    run, data = restore(RunData.open(load_json(Recipe, recipe), options.data, options.run), options.stage)
    to_linear(run.model)
    stream = Stream(data, run.config.batch_size, options.seed)
    parts = gradient_exponents(run, next(stream))
    stream.close()
    header = ("gradients of", "98% of exponents", "zeros", *(f"lost in {name}" for name in SMALLEST_SUBNORMAL))
    rows = []
    for module, kinds in parts.items():
        for kind, exponents in kinds.items():
            low, high = exponents.central_range()
            total = int(exponents.counts.sum()) + exponents.zeros
            lost = (f"{exponents.underflow(limit, options.scale):.1%}" for limit in SMALLEST_SUBNORMAL.values())
            rows.append((f"{module}, {kind}", f"{low} to {high}", f"{exponents.zeros / max(total, 1):.1%}", *lost))
    summary = f"{len(parts)} parts, a batch of {run.config.batch_size}, gradients times {options.scale:g}"
    print(f"{summary}\n{render_table(header, rows, align='left')}")
    if options.output:
        from limner.evaluation import report

        charts = [
            report.chart(module, {kind: x.shares() for kind, x in kinds.items()}, x_label="floor(log2|gradient|)")
            for module, kinds in parts.items()
        ]
        body = f'<p>{summary}</p>{report.table(rows, header)}<div class="charts">{"".join(charts)}</div>'
        title = f"Exponents of the gradients of {options.run}"
        print(f"written: {escape_control(report.save_page(options.output, title, f'<h1>{escape(title)}</h1>{body}'))}")


@dataclass(frozen=True, kw_only=True)
class GraphOptions(Validated):
    """Show the autograd graph of a training step, and the bytes that each resblock saves for the backward pass.

    Weights and batch are random. Modules are folded; in an open one, each node has its edges with input numbers, and
    its saved tensors with sizes. The text of two graphs can be compared with diff.
    """

    model: Annotated[Positional[str], arg(metavar="MODEL|RUN")]
    """A model (name or folder), or a run of `limner train`, with its objective, precision and scaling."""
    stage: Literal["dvae", "prior", "contrastive"] = "prior"
    """Which of its models."""
    open: tuple[str, ...] = ()
    """Modules to open, such as blocks.0.attention."""
    samples: Annotated[int, Range(1, 2**16)] = 1
    """Samples of the batch."""
    precision: Annotated[str | None, arg(metavar="NAME")] = None
    """Number formats, such as bf16 or switchback; by default those of the run, or auto for a model."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""
    output: OutputFile = None
    """Write the graph as SVG instead of printing it."""


def graph(options: GraphOptions) -> None:
    """what does the backward pass of a training step run, and what does it save?"""
    from limner.autograd.fold import fold
    from limner.autograd.svg import draw

    step = _training_step(options)
    whole = step.graph()
    folded, saved = fold(whole, options.open), step.saved_bytes(whole)
    sums = [None if None in column else sum(column) for column in zip(*saved.values(), strict=True)]
    rows = [
        (name, *("-" if size is None else f"{size:,}" for size in sizes))
        for name, sizes in {**saved, "sum": sums}.items()
    ]
    title = f"{options.stage} of {options.model}: {len(whole.nodes):,} nodes, a batch of {options.samples}"
    print(escape_control(title))
    print(render_table(("saved bytes", "activations", "checkpointing frees", "8-bit inputs free"), rows))
    if options.output is None:
        print(f"\n{folded.text()}")
    else:
        atomic_write_text(options.output, draw(folded, title))
        print(f"written: {escape_control(options.output)}")


def _training_step(options: GraphOptions) -> TrainingStep:
    """Return the step of a run's stage, or of a model with the default objective."""
    import torch

    from limner import bundles
    from limner.planner.saved_tensors import OBJECTIVES, TrainingStep
    from limner.quantization.precisions import TrainingPrecision
    from limner.recipes.recipe import Recipe, resolve
    from limner.text.bpe import Tokenizer
    from limner.training.config import TrainConfig

    run, name = Path(options.model), options.stage
    if (run / "recipe.json").exists():
        tokenizer = run / "tokenizer.json"
        vocab = Tokenizer.load(tokenizer).vocab_size if tokenizer.exists() else None
        resolved = resolve(load_json(Recipe, run / "recipe.json"), vocab)
        if name not in resolved.stages:
            raise UserError(f"the run in {run} trains no {name}: choose {', '.join(resolved.stages)}")
        model, stage = resolved.models[name], resolved.stages[name]
        objective, training, distractors = stage.objective, stage.training, getattr(stage, "distractors", 0)
    else:
        model = bundles.load_model(options.model, name).config
        objective, training, distractors = OBJECTIVES[type(model)](), TrainConfig(steps=1), 0
    if options.precision:
        training = replace(training, precision=from_dict(TrainingPrecision, options.precision, "--precision"))
    if options.checkpointing:
        training = replace(training, checkpoint_activations=True)
    return TrainingStep(
        model=model, objective=objective, training=training, samples=options.samples, distractors=distractors,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )  # fmt: skip


def _records(run: Path, file: str) -> dict[str, Path]:
    """Return the files named `file` in the stages of a run, by stage title; "" if `run` is a stage folder."""
    from limner.recipes.recipe import STAGE_TITLES

    paths = {title: run / name / file for name, title in STAGE_TITLES.items()} | {"": run / file}
    return {title: path for title, path in paths.items() if path.exists()}


def _precision_lines(title: str, path: Path) -> Iterator[str]:
    """Yield the lines of the report on one model."""
    from limner.quantization import HalfLinear
    from limner.quantization.products import Product, counts_from_json

    products, unlogged = get_args(Product), ("Linear", HalfLinear.__name__)
    try:
        record = read_json(path)
        head = f"{title}: {record['precision']}, {int(record['step']):,} steps"
        layers = [
            (str(x["name"]), str(x["kind"]), str(x.get("weight", "float32")), counts_from_json(x["products"]))
            for x in record["layers"]
        ]
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path} is damaged: resume training, and the next checkpoint replaces it") from None
    yield escape_control(head)
    rows = [
        (name, kind, weight, *("torch's" if kind in unlogged else _kernels(counts, product) for product in products))
        for name, kind, weight, counts in layers
    ]
    yield render_table(("layer", "kind", "weight", *products), rows, align="left")
    if total := sum((counts for *_, counts in layers), Counter()):
        yield escape_control(_fallback_line(total))


def _kernels(counts: Counts, product: str) -> str:
    """Format kernels and counts as "_int_mm x 20, reference x 3"; "-" if the product was never computed."""
    by_kernel = Counter[str]()
    for (computed, kernel, _), n in counts.items():
        by_kernel[kernel] += n if computed == product else 0
    return ", ".join(f"{kernel} x {n:,}" for kernel, n in by_kernel.items() if n) or "-"


def _fallback_line(counts: Counts) -> str:
    """Return the line on fallbacks: the number of products without the fast kernel, and the reasons."""
    reasons = Counter[Any]()
    for (_, kernel, reason), n in counts.items():
        if reason:
            reasons[kernel, reason] += n
    details = "; ".join(f"{n:,} to {kernel}, since {reason}" for (kernel, reason), n in reasons.items())
    return f"fallbacks: {reasons.total():,} of {counts.total():,} products" + (f": {details}" if details else "")
