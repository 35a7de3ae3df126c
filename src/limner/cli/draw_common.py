"""What `limner draw` and `limner edit` share: options, and the way from a caption to PNG files."""

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

_NAME_BYTES = 120  # of a caption in a file's name; names may have 255 bytes, on some file systems 143


def _models() -> str:
    lines = [f"{name}: {about}" for name, about in pretrained.bundled().items()]
    return "\n".join(["A folder that `limner train` wrote, or a model of the package by name:", *lines])


@dataclass(frozen=True, kw_only=True)
class DrawOrEdit(Checked):
    """The caption of a picture, and what becomes of it.

    `suffix` of file names tells an edited picture from the one that it was, which often has the same caption.
    """

    suffix: ClassVar[str] = ""

    n: Annotated[int, arg(aliases=("-n",)), Range(1, 2**16)] = 1
    """How many drawings to keep, the best that differ."""
    options: Annotated[GenerationConfig, arg(name="")] = GenerationConfig(candidates=16)
    model: Annotated[str, arg(help=_models())] = pretrained.DEFAULT
    output: Annotated[str | None, arg(aliases=("-o",))] = None
    """A PNG file (NAME-1.png, NAME-2.png, ... for several) or a folder; named after the caption by default."""
    scale: Annotated[int | None, Range(1, 2**14)] = None
    """Enlarge by this whole factor; by default to at least 384 pixels, 1 keeps the model's own pixels."""


def draw(options: DrawOrEdit, caption: str, given: Callable[[Any], Any] | None = None) -> None:
    """Write the drawings of a caption. `given` makes what is fixed of the picture, from the loaded model."""
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
    """Where to write, checked before any work is done."""
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
    """The file that `--output` means: in a folder, it has the name."""
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
