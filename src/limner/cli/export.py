"""`limner export MODEL -o OUT`: a model that draws without torch, as a bundle with ONNX files or as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from limner.cli.arguments import check_writable, parse
from limner.errors import escape_control
from limner.progress import progress


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model for drawing without torch.

    `onnx` writes a copy of the bundle with ONNX files, which `limner draw` and `limner edit` use without importing
    torch. The ONNX files have operations only; the weights stay in the bundle's own files. At the end both draw four
    captions, and the number of equal drawings is printed. `page` writes one HTML file that draws in a browser,
    without a server and without a network.
    """

    model: Positional[Annotated[str, arg(metavar="NAME|FOLDER")]]
    """A folder that `limner train` wrote, or the name of a bundled model."""
    to: Literal["onnx", "page"] = "onnx"
    """A bundle with ONNX files, or an HTML page."""
    out: Annotated[Path, arg(aliases=("-o",), metavar="FOLDER|FILE")]
    """The new folder, or that of the bundle itself; for a page, the HTML file."""
    onnxruntime_web: Annotated[Path | None, arg(metavar="FILE|FOLDER")] = None
    """For a page: the npm package onnxruntime-web, which `npm pack onnxruntime-web@1.30` downloads."""


def main(argv: Sequence[str]) -> None:
    """Export a model."""
    options = parse(Export, argv, "limner export")
    (_onnx if options.to == "onnx" else _page)(options)


def _onnx(options: Export) -> None:
    """Write a bundle with ONNX files, then compare drawings."""
    out = check_writable(options.out, "folder")
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


def _page(options: Export) -> None:
    """Write an HTML page."""
    out = check_writable(options.out)
    from limner.export.page import PARTS, export_page, read_web

    runtime = read_web(options.onnxruntime_web)
    with progress("writing the page", PARTS, unit="part") as bar:
        export_page(options.model, out, runtime, bar.advance)
    print(f"{escape_control(out)}: {out.stat().st_size / 1e6:.1f} MB, to open in a browser")
