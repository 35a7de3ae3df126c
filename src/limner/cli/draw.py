"""`limner draw "a caption"`: draw a caption and write PNG files. `limner edit` shares the options and the drawing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from limner import pretrained
from limner.cli.arguments import check_writable, parse
from limner.errors import UserError, escape_control
from limner.progress import progress
from limner.sampling.generation_config import GenerationConfig
from limner.validation import Range, Validated

_MAX_NAME_BYTES = 120  # of the caption in a file name; file systems allow 255 bytes, some 143


def _model_help() -> str:
    lines = [f"{name}: {about}" for name, about in pretrained.list_pretrained().items()]
    return "\n".join(["A folder that `limner train` wrote, or the name of a bundled model:", *lines])


@dataclass(frozen=True, kw_only=True)
class DrawOrEdit(Validated):
    """Options of drawing and editing.

    `suffix` is part of the default file name: an edited picture often has the same caption as its original. `rerank`
    is the folder of another CLIP model.
    """

    suffix: ClassVar[str] = ""
    rerank: ClassVar[Path | None] = None

    n: Annotated[int, arg(aliases=("-n",)), Range(1, 2**16)] = 1
    """Number of drawings to keep, the best distinct ones."""
    options: Annotated[GenerationConfig, arg(name="")] = GenerationConfig()
    model: Annotated[str, arg(help=_model_help(), metavar="NAME|FOLDER")] = pretrained.DEFAULT
    adapter: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Folder of a LoRA adapter of the model, such as `limner finetune` writes."""
    output: Annotated[str | None, arg(aliases=("-o",), metavar="FILE|FOLDER")] = None
    """A PNG file (NAME-1.png, NAME-2.png, ... for several) or a folder; by default a file named after the caption."""
    scale: Annotated[int | None, Range(1, 2**14)] = None
    """Integer factor of enlargement; by default to at least 384 pixels. 1 keeps the model's resolution."""
    engine: Literal["onnx", "torch"] | None = None
    """The library that computes; by default ONNX Runtime, which starts faster, if the model has ONNX files."""
    svg: bool = False
    """Also write each drawing as an SVG file, traced from a gray picture such as an icon."""


@dataclass(frozen=True, kw_only=True)
class Draw(DrawOrEdit):
    """Draw a caption: sample candidates, score them, and write the best as PNG files.

    The same caption, seed and settings give the same picture.
    """

    caption: Positional[str]
    """Description of the picture, in quotes."""
    rerank: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """A CLIP model of `limner convert clip`, whose cosine ranks the candidates in place of the model's own score."""


def main(argv: Sequence[str]) -> None:
    """Draw a caption."""
    options = parse(Draw, argv, "limner draw")
    draw(options, options.caption)


def draw(options: DrawOrEdit, caption: str, prime: Callable[[Any], Any] | None = None) -> None:
    """Draw a caption and write PNG files. `prime` maps the loaded model to prompt tokens. Raises `UserError`."""
    if not caption.strip():
        raise UserError("the caption is empty: describe the picture")
    out = output_path(options, caption)
    import numpy as np

    from limner.drawing import enlargement
    from limner.vectorize import to_svg

    if options.svg:
        to_svg(np.zeros((8, 8, 3), np.uint8))  # raises an error without contourpy, before the model draws
    pipe = _load(options)
    enlargement(pipe.size, options.scale)
    prompt_tokens = prime(pipe) if prime else None
    number = max(options.n, options.options.candidates or pipe.defaults.candidates or 16)
    settings = replace(options.options, candidates=number)
    with progress("drawing", number, unit="picture") as bar:
        drawings = pipe(caption, settings, n=options.n, prompt_tokens=prompt_tokens, progress=bar.advance)
    for drawing, path in zip(drawings, drawings.save(out, options.scale), strict=True):
        print(f"{escape_control(path)}  (score {drawing.score:.3f}, candidate {drawing.candidate} of {number})")
    for path in drawings.save(out.with_suffix(".svg")) if options.svg else ():
        print(escape_control(path))
    if follows := drawings[0].settings["follows"]:
        print(f"follows the training picture {escape_control(follows)!r}")
    elif prime is None and pipe.examples:
        similar = get_close_matches(caption.partition(",")[0].lower(), set(pipe.examples.subjects), 1, cutoff=0.8)
        sentence = "no training picture shows a subject of the caption, which was drawn from its words alone"
        print(sentence + (f": did you mean {similar[0]!r}?" if similar else ""), file=sys.stderr)
    if (distinct := len({drawing.image.tobytes() for drawing in drawings})) < options.n:
        print(f"only {distinct} of {number} candidates differ: a higher --temperature may give more", file=sys.stderr)


def _load(options: DrawOrEdit) -> Any:
    """Load the model with the engine, by default ONNX Runtime if it has ONNX files and nothing is added to it."""
    model, engine, added = options.model, options.engine, {"adapter": options.adapter, "rerank": options.rerank}
    if engine == "onnx" and any(added.values()):
        advice = "leave out --engine onnx, or draw with the merged bundle"
        raise UserError(f"ONNX files cannot take an adapter or another CLIP model: {advice}")
    if engine != "torch" and not any(added.values()):
        from limner.runtime import pipeline

        if engine == "onnx" or pipeline.has_graphs(model):
            return pipeline.OnnxPipeline(model)
    from limner.pipeline import load  # imports torch, which takes seconds

    return load(model, **added)


def output_path(options: DrawOrEdit, caption: str) -> Path:
    """Return the PNG file, or the name that several are numbered from. Raises `UserError` if one is not writable."""
    words = re.sub(r"[^\w]+", "-", caption.lower()).strip("-")[:80]
    name = (words.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").strip("-") or "drawing") + options.suffix
    if options.options.seed:
        name += f"-seed-{options.options.seed}"
    from limner.drawing import numbered

    out = _output_file(options.output, f"{name}.png")
    for file in (out, out.with_suffix(".svg"))[: 1 + options.svg]:
        names = numbered(file, options.n)
        check_writable(next((path for path in names if os.path.isdir(path)), names[-1]))
    return out


def _output_file(output: str | None, name: str) -> Path:
    """Return the file of `--output`; `name` is the file name in a folder or without `--output`."""
    if output is None:
        return Path(name)
    if not output:
        raise UserError("--output is empty: name a PNG file or a folder")
    out = Path(output)
    if os.path.isdir(out) or output.endswith("/") or out.name == "..":
        return out / name
    if not out.suffix:
        return out.with_suffix(".png")
    if out.suffix.lower() != ".png":
        raise UserError(f"drawings are PNG files: use the name {out.with_suffix('.png')}, not {out}")
    return out
