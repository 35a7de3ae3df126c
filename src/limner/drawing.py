"""Drawings with provenance, and their PNG and SVG files.

Every file states that a model drew it: caption, seed and model as text, and an XMP packet with the IPTC digital source
type "trained algorithmic media".
"""

from __future__ import annotations

import io
import math
from collections import UserList
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from limner.atomic_io import atomic_write_bytes
from limner.data.image_encode import image_bytes
from limner.errors import UserError, escape_control
from limner.vectorize import to_svg
from limner.version import __version__

SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
ImageKind = Literal["png", "jpeg", "webp"]

_MIN_SAVED_PIXELS = 384  # side to which saved drawings are enlarged by an integer factor
_MIN_SHEET_PIXELS = 192  # the same for drawings on a sheet
_SHEET_GAP_PIXELS = 8


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture with its provenance.

    Attributes:
        image: RGB, at the model's resolution.
        score: cosine of caption and picture under the contrastive model, in [-1, 1], plus the model's likelihood
            weight (default 0) times the mean log-probability of the tokens under the prior, in nats. If a part of the
            picture was given, the mean log-probability alone.
        candidate: number from 1, as in the output of `limner draw` and in the PNG;
            (model, caption, seed, candidate, settings) determine the picture.
        settings: of the sampler; "follows" names the training picture that was followed, if one was.
    """

    image: Image.Image
    caption: str
    score: float
    seed: int
    candidate: int
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def png(self, scale: int | None = None) -> bytes:
        """Return a PNG file: pixels enlarged `scale` times, metadata, XMP.

        The default enlarges to at least 384 pixels. Raises `UserError` if `scale` is out of range.
        """
        scale = enlargement(max(self.image.size), scale)
        return _encode_png(_enlarged(self.image, scale), self.caption, self.model, self._metadata())

    def file(self, kind: ImageKind, scale: int | None = None, quality: int = 95) -> bytes:
        """Return a file as `png` does; JPEG and WebP, of a quality from 0 to 100, have the XMP packet alone."""
        if kind == "png":
            return self.png(scale)
        buffer, image = io.BytesIO(), _enlarged(self.image, enlargement(max(self.image.size), scale))
        xmp = xmp_packet(escape_control(self.caption), self.model).encode()
        image.save(buffer, kind.upper(), quality=quality, xmp=xmp)
        return buffer.getvalue()

    def svg(self) -> str:
        """Return an SVG document traced from a gray picture, with the PNG's metadata.

        Raises `UserError` for a picture with colors, and without contourpy.
        """
        text = "; ".join(f"{key}: {value}" for key, value in self._metadata().items() if value is not None)
        metadata = escape(escape_control(text)) + _xmp(escape_control(self.caption), self.model)
        return to_svg(np.asarray(self.image), self.caption, metadata)

    def _metadata(self) -> dict[str, Any]:
        score = f"{self.score:.4f}"
        return {"seed": self.seed, "candidate": self.candidate, "score": score, "model": self.model, **self.settings}

    def _repr_png_(self) -> bytes:
        """Return a PNG for notebooks."""
        return self.png()

    def save(self, path: str | Path, scale: int | None = None) -> Path:
        """Write a PNG, or an SVG if the name ends in .svg, atomically.

        Raises `UserError` for another ending, if `scale` (of a PNG) is out of range, and as `svg` does.
        """
        path = Path(path)
        if path.suffix.lower() not in (".png", ".svg"):
            raise UserError(f"drawings are PNG or SVG files: use {path.with_suffix('.png').name!r}, not {path.name!r}")
        atomic_write_bytes(path, self.svg().encode() if path.suffix.lower() == ".svg" else self.png(scale))
        return path


def enlargement(size: int, scale: int | None) -> int:
    """Return `scale`, or for None the integer factor that enlarges `size` pixels to at least 384.

    Raises `UserError` if `scale` is below 1 or gives more than 16,384 pixels.
    """
    if scale is None:
        return max(1, math.ceil(_MIN_SAVED_PIXELS / size))
    if scale < 1 or size * scale > 1 << 14:
        widest = (1 << 14) // size
        raise UserError(f"scale {scale} would give a picture of {size * scale} pixels per side: choose 1 to {widest}")
    return scale


def numbered(path: Path, n: int) -> list[Path]:
    """Return the file names of n drawings: `path` for one, NAME-1.png, NAME-2.png, ... for several."""
    return [path] if n == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(1, n + 1)]


class Drawings(UserList[Drawing]):
    """The drawings of one caption, best first."""

    @classmethod
    def best(
        cls, pictures: np.ndarray, scores: np.ndarray, tokens: np.ndarray, n: int, *, caption: str, seed: int,
        model: str, settings: Mapping[str, Any],
    ) -> Drawings:  # fmt: skip
        """Return the n best of N candidates; those that repeat the tokens of a better one come last.

        Shapes: pictures uint8 [N, 3, H, W], scores [N], tokens [N, S].
        """
        order = np.argsort(-scores, kind="stable").tolist()
        first = set({tokens[i].tobytes(): i for i in reversed(order)}.values())  # best of equal candidates
        order = [*(i for i in order if i in first), *(i for i in order if i not in first)]
        return cls(
            Drawing(
                image=Image.fromarray(np.ascontiguousarray(pictures[i].transpose(1, 2, 0))), caption=caption,
                score=float(scores[i]), seed=seed, candidate=i + 1, model=model, settings=settings,
            )
            for i in order[:n]
        )  # fmt: skip

    @property
    def images(self) -> list[Image.Image]:
        return [d.image for d in self]

    @property
    def scores(self) -> list[float]:
        return [d.score for d in self]

    @property
    def caption(self) -> str:
        return self[0].caption

    @property
    def seed(self) -> int:
        return self[0].seed

    def save(self, path: str | Path, scale: int | None = None) -> list[Path]:
        """Write a file per drawing, best first. Return the paths, as of `numbered`. Raises `UserError`."""
        return [drawing.save(name, scale) for drawing, name in zip(self, numbered(Path(path), len(self)), strict=True)]

    def _repr_png_(self) -> bytes | None:
        """Return a PNG for notebooks: all drawings on one sheet, best first, row by row."""
        if len(self) < 2:
            return self[0].png() if len(self) else None
        columns = min(len(self), max(4, math.ceil(len(self) ** 0.5)))
        rows = math.ceil(len(self) / columns)
        pictures = [_enlarged(d.image, max(1, math.ceil(_MIN_SHEET_PIXELS / max(d.image.size)))) for d in self]
        w, h = pictures[0].size
        gap = _SHEET_GAP_PIXELS
        sheet = Image.new("RGB", (columns * (w + gap) - gap, rows * (h + gap) - gap), "white")
        for i, picture in enumerate(pictures):
            sheet.paste(picture, (i % columns * (w + gap), i // columns * (h + gap)))
        model = self[0].model
        return _encode_png(sheet, self.caption, model, {"seed": self.seed, "model": model})


def _enlarged(image: Image.Image, scale: int) -> Image.Image:
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def _encode_png(picture: Image.Image, caption: str, model: str, metadata: Mapping[str, Any]) -> bytes:
    """Return a PNG with caption and metadata as text, and an XMP packet."""
    info, caption = PngInfo(), escape_control(caption)
    info.add_itxt("caption", caption)
    for key, value in metadata.items():
        if value is not None:
            info.add_text(key, escape_control(str(value)))
    info.add_text("Software", f"limner {__version__}")
    info.add_itxt("Description", caption)
    info.add_itxt("XML:com.adobe.xmp", xmp_packet(caption, model))
    return image_bytes(picture, pnginfo=info)


def xmp_packet(caption: str, model: str) -> str:
    """Return the XMP packet of a PNG file for a caption without control characters."""
    return f'<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>\n{_xmp(caption, model)}\n<?xpacket end="r"?>'


def _xmp(caption: str, model: str) -> str:
    """Return XMP metadata (ISO 16684-1) with the IPTC digital source type."""
    return f"""<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
  <rdf:Description rdf:about=""
    xmlns:dc="http://purl.org/dc/elements/1.1/"
    xmlns:xmp="http://ns.adobe.com/xap/1.0/"
    xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/">
   <Iptc4xmpExt:DigitalSourceType>{SOURCE_TYPE}</Iptc4xmpExt:DigitalSourceType>
   <xmp:CreatorTool>limner {__version__} ({escape(escape_control(model))})</xmp:CreatorTool>
   <dc:description><rdf:Alt><rdf:li xml:lang="x-default">{escape(caption)}</rdf:li></rdf:Alt></dc:description>
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>"""
