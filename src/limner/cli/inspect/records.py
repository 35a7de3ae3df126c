"""`limner inspect precision | spikes`: number formats and kernels, and loss spikes, from the records of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.errors import UserError, escape_control
from limner.json_files import read_json
from limner.text_table import render_table
from limner.validation import Validated

if TYPE_CHECKING:
    from limner.quantization.products import Counts


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Show the format of stored weights for each linear layer of a model, and for 8-bit layers the kernels of each
    matrix product with their counts. Products of other layers use torch's kernels and are not counted.

    If a kernel does not support a product, a fallback computes it: a table's last line gives count and reasons.
    Counts include evaluations during training and recomputation by checkpointing.
    """

    run: Positional[Path]
    """A run of `limner train`, or the folder of one of its stages."""


@dataclass(frozen=True, kw_only=True)
class SpikesOptions(Validated):
    """Find loss spikes of a run, and the matrices that predict them: their RMS_t spikes 1 to 8 steps earlier
    (Wortsman et al. 2023)."""

    run: Positional[Path]
    """A run of `limner train`, or the folder of one of its stages, such as runs/mine/prior."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write a page with the curves of one stage."""


def precision(argv: Sequence[str]) -> None:
    """show the formats of weights, and the kernels of 8-bit layers with their counts"""
    run = parse(PrecisionOptions, argv, "limner inspect precision").run
    if not run.is_dir():
        raise UserError(f"{run} is not a folder: name the --out folder of `limner train`")
    from limner.training.kernel_report import FILE

    files = _records(run, FILE)
    if not files:
        if not any((run / name).exists() for name in ("recipe.json", "config.json")):
            raise UserError(f"{run} is not a run folder: name the --out folder of `limner train`")
        raise UserError(
            f"{run} lacks records of low-precision layers: train with --prior.training.precision switchback or "
            "fp16weights, for example; each checkpoint writes the record"
        )
    print("\n\n".join("\n".join(_precision_lines(title or "run", path)) for title, path in files.items()))


def spikes(argv: Sequence[str]) -> None:
    """did RMS_t predict the spikes of the loss?"""
    options = parse(SpikesOptions, argv, "limner inspect spikes")
    if options.output:
        check_writable(options.output)
    from limner.evaluation.loss_spikes import STABILITY_FILE, spike_report

    stages = _records(options.run, STABILITY_FILE) or {"": options.run / STABILITY_FILE}
    if options.output and len(stages) > 1:
        folder = next(iter(stages.values())).parent
        raise UserError(f"{options.run} has several stages: name one for a page, such as {folder}")
    reports = {title: spike_report(path.parent) for title, path in stages.items()}
    print("\n\n".join((f"{title}: " if title else "") + report.text() for title, report in reports.items()))
    if options.output:
        ((title, report),) = reports.items()
        page = report.save(options.output, f"Spikes of {stages[title].parent}")
        print(f"written: {escape_control(page)}")


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
    by_kernel: Counter[str] = Counter()
    for (computed, kernel, _), n in counts.items():
        by_kernel[kernel] += n if computed == product else 0
    return ", ".join(f"{kernel} x {n:,}" for kernel, n in by_kernel.items() if n) or "-"


def _fallback_line(counts: Counts) -> str:
    """Return the line on fallbacks: the number of products without the fast kernel, and the reasons."""
    reasons: Counter[Any] = Counter()
    for (_, kernel, reason), n in counts.items():
        if reason:
            reasons[kernel, reason] += n
    if not reasons:
        return f"fallbacks: 0 of {counts.total():,} products"
    details = "; ".join(f"{n:,} to {kernel}, since {reason}" for (kernel, reason), n in reasons.items())
    return f"fallbacks: {reasons.total():,} of {counts.total():,} products: {details}"
