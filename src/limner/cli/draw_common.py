"""Options of `limner draw` and `limner edit`, and the function that draws and writes PNG files."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import arg

from limner import pretrained
from limner.cli.arguments import place
from limner.errors import UserError, printable
from limner.progress import progress
from limner.sampling.generation_config import GenerationConfig
from limner.validation import Checked, Range

_NAME_BYTES = 120  # of the caption in a file name; file systems allow 255 bytes, some 143


def _models() -> str:
    lines = [f"{name}: {about}" for name, about in pretrained.bundled().items()]
    return "\n".join(["A folder that `limner train` wrote, or a model of the package by name:", *lines])


@dataclass(frozen=True, kw_only=True)
class DrawOrEdit(Checked):
    """Options of drawing and editing.

    `suffix` is part of the default file name: an edited picture often has the same caption as its original.
    """

    suffix: ClassVar[str] = ""

    n: Annotated[int, arg(aliases=("-n",)), Range(1, 2**16)] = 1
    """Number of drawings to keep, the best distinct ones."""
    options: Annotated[GenerationConfig, arg(name="")] = GenerationConfig(candidates=16)
    model: Annotated[str, arg(help=_models())] = pretrained.DEFAULT
    output: Annotated[str | None, arg(aliases=("-o",))] = None
    """A PNG file (NAME-1.png, NAME-2.png, ... for several) or a folder; by default a file named after the caption."""
    scale: Annotated[int | None, Range(1, 2**14)] = None
    """Integer factor of enlargement; by default to at least 384 pixels. 1 keeps the model's resolution."""


def draw(options: DrawOrEdit, caption: str, given: Callable[[Any], Any] | None = None) -> None:
    """Draw a caption and write PNG files. `given` maps the loaded model to fixed tokens. Raises `UserError`."""
    if not caption.strip():
        raise UserError("the caption is empty: write what the picture shows")
    out = output_path(options, caption)
    from limner.drawing import enlargement
    from limner.pipeline import load  # heavy, so only now

    pipe = load(options.model)
    enlargement(pipe.dvae.config.size, options.scale)
    fixed = given(pipe) if given else None
    number = max(options.n, options.options.candidates)
    with progress("drawing", number, unit="picture") as bar:
        drawings = pipe(caption, options.options, n=options.n, given=fixed, progress=bar.advance)
    for drawing, path in zip(drawings, drawings.save(out, options.scale), strict=True):
        print(f"{printable(path)}  (score {drawing.score:.3f}, candidate {drawing.candidate} of {number})")
    if (kinds := len({drawing.image.tobytes() for drawing in drawings})) < options.n:
        print(f"only {kinds} of {number} candidates differ: a higher --temperature may give more", file=sys.stderr)


def output_path(options: DrawOrEdit, caption: str) -> Path:
    """Return the output file. Raises `UserError` if it is not writable."""
    words = re.sub(r"[^\w]+", "-", caption.lower()).strip("-")[:80]
    name = (words.encode()[:_NAME_BYTES].decode(errors="ignore").strip("-") or "drawing") + options.suffix
    if options.options.seed:
        name += f"-seed-{options.options.seed}"
    from limner.drawing import numbered

    out = _named(options.output, f"{name}.png")
    names = numbered(out, options.n)
    place(next((path for path in names if os.path.isdir(path)), names[-1]))
    return out


def _named(output: str | None, name: str) -> Path:
    """Return the file of `--output`; `name` is the file name in a folder or without `--output`."""
    if output is None:
        return Path(name)
    if not output:
        raise UserError("the output has no name: give a PNG file or a folder")
    out = Path(output)
    if os.path.isdir(out) or output.endswith("/") or out.name == "..":
        return out / name
    if not out.suffix:
        return out.with_suffix(".png")
    if out.suffix.lower() != ".png":
        raise UserError(f"drawings are PNG files: name the output {out.with_suffix('.png')}, not {out}")
    return out
