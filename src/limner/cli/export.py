"""`limner export MODEL -o OUT`: a bundle that draws without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.errors import escape_control
from limner.progress import progress


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a copy of a bundle with ONNX files, which `limner draw` and `limner edit` use without importing torch.

    The ONNX files have operations only; the weights stay in the bundle's own files. At the end both draw four
    captions, and the number of equal drawings is printed.
    """

    model: Positional[Annotated[str, arg(metavar="NAME|FOLDER")]]
    """A folder that `limner train` wrote, or the name of a bundled model."""
    out: Annotated[Path, arg(aliases=("-o",), metavar="FOLDER")]
    """The new folder, or that of the bundle itself."""


def main(argv: Sequence[str]) -> None:
    """Export a bundle, then compare drawings."""
    options = parse(Export, argv, "limner export")
    out = check_writable(options.out, folder=True)
    import numpy as np

    from limner.export.compare import DRAWINGS, equal_tokens
    from limner.export.onnx import GRAPHS, export_onnx
    from limner.numerics.precision import Fp32
    from limner.pipeline import load
    from limner.runtime.pipeline import OnnxPipeline

    with progress("recording graphs", GRAPHS, unit="graph") as bar:
        export_onnx(options.model, out, bar.advance)
    exported = OnnxPipeline(out)

    def draw(caption: str, seed: int) -> np.ndarray:
        return exported.candidates(caption, 1, seed, exported.defaults.sampler)[2][0]

    with progress("comparing drawings", DRAWINGS, unit="drawing") as bar:
        shares = equal_tokens(load(out, precision=Fp32()), draw, bar.advance)
    megabytes = sum(path.stat().st_size for path in out.glob("*.onnx")) / 1e6
    equal, tokens = shares.count(1.0), sum(shares) / len(shares)
    print(f"{escape_control(out)}: {megabytes:.1f} MB of graphs")
    print(f"{equal} of {len(shares)} drawings equal those of torch in fp32, and {tokens:.1%} of tokens")
