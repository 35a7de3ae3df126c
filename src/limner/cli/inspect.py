"""`limner inspect precision | spikes | underflow`: a run's kernels, its spikes, what formats lose of its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from tyro.conf import Positional, arg

from limner.cli import dispatch
from limner.cli.arguments import parse, place
from limner.columns import table
from limner.config import load_json, read_json
from limner.errors import UserError, printable
from limner.ranges import SEEDS, Checked, Range

if TYPE_CHECKING:
    from limner.layers.tally import Counts


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Show with which kernels the layers of low precision were computed, product by product, and how often.

    A product that its kernel could not take was computed by another: the last line of a table says how many, and why.
    Evaluations during training are counted as well, and what checkpointing recomputes.
    """

    run: Positional[Path]
    """A run of `limner train`, or the folder of one of its stages."""


@dataclass(frozen=True, kw_only=True)
class SpikesOptions(Checked):
    """Find the spikes of a run's loss, and which matrix foretold them: its RMS_t spikes 1 to 8 steps before
    (Wortsman et al. 2023)."""

    run: Positional[Path]
    """A stage's folder in a run, such as runs/mine/prior."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Write a page with the curves."""


@dataclass(frozen=True, kw_only=True)
class UnderflowOptions(Checked):
    """Count the exponents of the gradients of one batch, for each resblock, and what share of them formats lose."""

    run: Positional[Path]
    """The folder of a run."""
    data: Positional[str]
    """Its data."""
    stage: Literal["prior", "contrastive"] = "prior"
    scale: Annotated[float, Range(above=0)] = 1.0
    """What gradients are multiplied by before they are rounded; a resblock's scale begins at 8192."""
    seed: Annotated[int, SEEDS] = 0
    """Of the batch."""


def main(argv: Sequence[str]) -> None:
    dispatch("limner inspect", {"precision": precision, "spikes": spikes, "underflow": underflow}, argv)


def precision(argv: Sequence[str]) -> None:
    """show the kernels of layers in 8 bits, and how often each ran"""
    run = parse(PrecisionOptions, argv, "limner inspect precision").run
    if not run.is_dir():
        raise UserError(f"{run} is no folder: name the --out of a `limner train`")
    from limner.recipes.recipe import TITLES
    from limner.training.kernels import FILE

    files = {title: path for name, title in TITLES.items() if (path := run / name / FILE).exists()}
    if (run / FILE).exists():
        files["run"] = run / FILE
    if not files:
        if not any((run / name).exists() for name in ("recipe.json", "config.json")):
            raise UserError(f"{run} is no run: name the --out of a `limner train`")
        raise UserError(
            f"{run} has no layers of low precision: train with --prior.training.precision switchback, say; "
            "the first checkpoint brings the counts"
        )
    print("\n\n".join("\n".join(_report(title, path)) for title, path in files.items()))


def spikes(argv: Sequence[str]) -> None:
    """did RMS_t foretell the spikes of the loss?"""
    options = parse(SpikesOptions, argv, "limner inspect spikes")
    if options.output:
        place(options.output)
    from limner.evaluation.foretold import HEADER, foretold

    found = foretold(options.run)
    rows = [row for row in found.rows() if row[1] != "0"]
    said = next(iter(found.found.values())).loss if found.found else []
    steps = f", at steps {', '.join(map(str, said[:8]))}{' ...' if len(said) > 8 else ''}" if said else ""
    print(f"{len(found.loss):,} steps, {len(said)} spike{'s' * (len(said) != 1)} of the loss{steps}")
    print(table(HEADER, rows) if rows else "RMS_t of no matrix has spiked")
    if options.output:
        print(f"written: {printable(found.save(options.output, f'Spikes of {options.run}'))}")


def underflow(argv: Sequence[str]) -> None:
    """what share of the gradients would formats lose?"""
    options = parse(UnderflowOptions, argv, "limner inspect underflow")
    recipe = options.run / "recipe.json"
    if not recipe.exists():
        raise UserError(f"{options.run} is no run: it has no recipe.json, as `limner train --out` writes it")
    from limner.data.stream import Stream
    from limner.profiling.exponents import SMALLEST, exponents
    from limner.recipes.recipe import Recipe
    from limner.runs.material import Material
    from limner.runs.stages import Stages

    run, data = Stages(Material.of(load_json(Recipe, recipe), options.data, options.run)).trained(options.stage)
    stream = Stream(data, run.config.batch_size, options.seed)
    parts = exponents(run, next(stream))
    stream.close()
    header = ("gradients of", "98% of exponents", "zeros", *(f"lost in {name}" for name in SMALLEST))
    rows = []
    for part in parts:
        for what, found in (("activations", part.activations), ("parameters", part.parameters)):
            if found is None:
                continue
            low, high = found.range()
            total = int(found.counts.sum()) + found.zeros
            lost = (f"{found.flushed(smallest, options.scale):.1%}" for smallest in SMALLEST.values())
            rows.append((f"{part.name}, {what}", f"{low} to {high}", f"{found.zeros / max(total, 1):.1%}", *lost))
    print(f"{len(parts)} parts, a batch of {run.config.batch_size}, gradients times {options.scale:g}")
    print(table(header, rows))


def _report(title: str, path: Path) -> Iterator[str]:
    """The lines on one model."""
    from limner.layers.tally import Product, from_rows

    products = get_args(Product)
    try:
        found = read_json(path)
        head = f"{title}: {found['precision']}, {int(found['step']):,} steps"
        layers = [(str(x["name"]), str(x["kind"]), from_rows(x["products"])) for x in found["layers"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path} is no record of kernels: train on, and the next checkpoint writes it anew") from None
    yield printable(head)
    rows = [("layer", "kind", *products)]
    rows += [(name, kind, *(_kernels(counts, product) for product in products)) for name, kind, counts in layers]
    yield table(rows[0], rows[1:])
    yield printable(_fallen(sum((counts for *_, counts in layers), Counter())))


def _kernels(counts: Counts, product: str) -> str:
    """ "_int_mm x 20, reference x 3"; "-" if the product was never needed."""
    by_kernel: Counter[str] = Counter()
    for (what, kernel, _), n in counts.items():
        by_kernel[kernel] += n if what == product else 0
    return ", ".join(f"{kernel} x {n:,}" for kernel, n in by_kernel.items() if n) or "-"


def _fallen(counts: Counts) -> str:
    """How many products another kernel has computed than the fast one, and why."""
    reasons: Counter[Any] = Counter()
    for (_, kernel, why), n in counts.items():
        if why:
            reasons[kernel, why] += n
    if not reasons:
        return f"none of {counts.total():,} products fell back"
    said = "; ".join(f"{n:,} to {kernel}, since {why}" for (kernel, why), n in reasons.items())
    return f"{reasons.total():,} of {counts.total():,} products fell back: {said}"
