"""`limner draw "a caption"`: from a caption to PNG files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from limner.cli.arguments import parse
from limner.errors import UserError
from limner.training.progress import progress


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw a caption: candidates are sampled, the contrastive model picks the best, PNGs are written.

    The same caption, seed and settings give the same picture.
    """

    caption: Positional[str]
    """What the picture shows, in quotes."""
    n: Annotated[int, arg(aliases=("-n",))] = 1
    """How many drawings to keep, the best ones."""
    candidates: int = 16
    """How many to draw and choose from."""
    seed: int = 0
    """Another seed gives other drawings."""
    temperature: float = 1.0
    """1 samples what was learned, lower is safer and less varied, 0 takes the likeliest."""
    top_k: int | None = None
    """Sample among the k likeliest tokens only."""
    top_p: float | None = None
    """Sample among the likeliest tokens that make up this much probability."""
    model: str = "scenes"
    """A bundled model by name, or a folder that `limner train` wrote."""
    output: Annotated[Path | None, arg(aliases=("-o",))] = None
    """A PNG file (NAME-1.png, NAME-2.png, ... for several) or a folder; named after the caption by default."""
    scale: int | None = None
    """Enlarge by this whole factor; by default to at least 384 pixels, 1 keeps the model's own pixels."""


def main(argv: Sequence[str]) -> None:
    options = parse(Draw, argv, "limner draw")
    if not options.caption.strip():
        raise UserError("the caption is empty: write what the picture shows")
    if min(options.n, options.candidates) < 1:
        raise UserError("n and candidates must be at least 1")
    out = output_path(options)
    from limner.pipeline import load, make_sampler  # heavy, so only now

    make_sampler(options.temperature, options.top_k, options.top_p)  # complains before anything is loaded
    pipe = load(options.model)
    number = max(options.n, options.candidates)
    with progress("drawing", number, unit="picture") as bar:
        length = pipe.dvae.config.grid[0] * pipe.dvae.config.grid[1]
        drawings = pipe(
            options.caption, n=options.n, candidates=options.candidates, seed=options.seed,
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
            progress=lambda done, total: bar.advance(done // length - bar.done),
        )  # fmt: skip
    for drawing, path in zip(drawings, drawings.save(out, options.scale), strict=True):
        print(f"{path}  (score {drawing.score:.3f}, candidate {drawing.candidate + 1} of {number})")


def output_path(options: Draw) -> Path:
    """Where to write, checked before any work is done."""
    name = re.sub(r"[^\w]+", "-", options.caption.lower()).strip("-")[:80].strip("-") or "drawing"
    if options.seed:
        name += f"-seed-{options.seed}"
    out = options.output
    if out is None:
        return Path(f"{name}.png")
    if out.is_dir() or str(options.output).endswith("/"):
        return out / f"{name}.png"
    if not out.suffix:
        return out.with_suffix(".png")
    if out.suffix.lower() != ".png":
        raise UserError(f"drawings are PNG files: name the output {out.with_suffix('.png')}, not {out}")
    return out
