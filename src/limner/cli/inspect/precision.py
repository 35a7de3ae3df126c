"""`limner inspect precision`: number formats of stored weights, and the kernels that computed 8-bit layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tyro.conf import Positional

from limner.cli.arguments import parse
from limner.cli.inspect.stage_files import records
from limner.errors import UserError, printable
from limner.json_files import read_json
from limner.text_table import table

if TYPE_CHECKING:
    from limner.layers.kernel_counter import Counts


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Show the format of stored weights for each linear layer of a model, and for 8-bit layers the kernels of each
    matrix product with their counts. Products of other layers use torch's kernels and are not counted.

    If a kernel does not support a product, a fallback computes it: a table's last line gives count and reasons.
    Counts include evaluations during training and recomputation by checkpointing.
    """

    run: Positional[Path]
    """A run of `limner train`, or the folder of one of its stages."""


def main(argv: Sequence[str]) -> None:
    """show the formats of weights, and the kernels of 8-bit layers with their counts"""
    run = parse(PrecisionOptions, argv, "limner inspect precision").run
    if not run.is_dir():
        raise UserError(f"{run} is no folder: name the --out of a `limner train`")
    from limner.training.kernel_report import FILE

    files = records(run, FILE)
    if not files:
        if not any((run / name).exists() for name in ("recipe.json", "config.json")):
            raise UserError(f"{run} is no run: name the --out of a `limner train`")
        raise UserError(
            f"{run} has no layers of low precision: train with --prior.training.precision switchback, or fp16weights, "
            "say; the first checkpoint brings the record"
        )
    print("\n\n".join("\n".join(_report(title or "run", path)) for title, path in files.items()))


def _report(title: str, path: Path) -> Iterator[str]:
    """Yield the lines of the report on one model."""
    from limner.layers.half_linear import HalfLinear
    from limner.layers.kernel_counter import Product, counts_from_json

    products, ordinary = get_args(Product), ("Linear", HalfLinear.__name__)
    try:
        found = read_json(path)
        head = f"{title}: {found['precision']}, {int(found['step']):,} steps"
        layers = [
            (str(x["name"]), str(x["kind"]), str(x.get("weight", "float32")), counts_from_json(x["products"]))
            for x in found["layers"]
        ]
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path} is no record of kernels: train on, and the next checkpoint writes it anew") from None
    yield printable(head)
    rows = [
        (name, kind, weight, *("torch's" if kind in ordinary else _kernels(counts, product) for product in products))
        for name, kind, weight, counts in layers
    ]
    yield table(("layer", "kind", "weight", *products), rows)
    if total := sum((counts for *_, counts in layers), Counter()):
        yield printable(_fallen(total))


def _kernels(counts: Counts, product: str) -> str:
    """Format kernels and counts as "_int_mm x 20, reference x 3"; "-" if the product was never computed."""
    by_kernel: Counter[str] = Counter()
    for (what, kernel, _), n in counts.items():
        by_kernel[kernel] += n if what == product else 0
    return ", ".join(f"{kernel} x {n:,}" for kernel, n in by_kernel.items() if n) or "-"


def _fallen(counts: Counts) -> str:
    """Return the line on fallbacks: the number of products without the fast kernel, and the reasons."""
    reasons: Counter[Any] = Counter()
    for (_, kernel, why), n in counts.items():
        if why:
            reasons[kernel, why] += n
    if not reasons:
        return f"none of {counts.total():,} products fell back"
    said = "; ".join(f"{n:,} to {kernel}, since {why}" for (kernel, why), n in reasons.items())
    return f"{reasons.total():,} of {counts.total():,} products fell back: {said}"
