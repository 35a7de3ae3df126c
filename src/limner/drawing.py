"""A drawing and its file: a picture, how it came about, and a PNG that says so.

Every PNG says that a model drew it: caption, seed and model as text, and an XMP packet with the IPTC digital source
type "trained algorithmic media".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload
from xml.sax.saxutils import escape

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from limner.atomic_io import atomic_write_bytes
from limner.data.image_encode import image_bytes
from limner.errors import UserError, printable
from limner.version import __version__

SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"

_VIEWABLE = 384  # pixels: saved drawings are enlarged by a whole factor to at least this side
_BESIDE = 192  # pixels: the same of several on one sheet, with this much between them:
_GAP = 8


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One picture and how it came about.

    Attributes:
        image: RGB, in the model's own size.
        score: cosine of caption and picture under the contrastive model, in [-1, 1], and the mean of its tokens'
            log-probabilities under the prior, in nats, times the weight that the model brings along (0 if it brings
            none); of a picture of which a part was given, that mean alone.
        candidate: its number among the candidates, from 1 on, as `limner draw` prints it and the PNG has it;
            (model, caption, seed, candidate, settings) fix the picture.
    """

    image: Image.Image
    caption: str
    score: float
    seed: int
    candidate: int
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def png(self, scale: int | None = None) -> bytes:
        """The file's content: pixels enlarged `scale` times, metadata, XMP.

        The default enlarges to at least 384 pixels by a whole factor; 1 keeps the model's own pixels.
        """
        facts = {
            "seed": self.seed, "candidate": self.candidate, "score": f"{self.score:.4f}", "model": self.model,
            **self.settings,
        }  # fmt: skip
        scale = enlargement(max(self.image.size), scale)
        return _file(_enlarged(self.image, scale), self.caption, self.model, facts)

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return self.png()

    def save(self, path: str | Path, scale: int | None = None) -> Path:
        """Write a PNG, all or nothing. Raises `UserError` if the name ends otherwise."""
        path = Path(path)
        if path.suffix.lower() != ".png":
            raise UserError(f"drawings are PNG files: name it {path.with_suffix('.png').name!r}, not {path.name!r}")
        atomic_write_bytes(path, self.png(scale))
        return path


def enlargement(size: int, scale: int | None) -> int:
    """The whole factor that pictures of `size` pixels are enlarged by; None is to 384 at least. Raises `UserError`."""
    if scale is None:
        return max(1, math.ceil(_VIEWABLE / size))
    if scale < 1 or size * scale > 1 << 14:
        widest = (1 << 14) // size
        raise UserError(f"scale {scale} would give a picture of {size * scale} pixels per side: choose 1 to {widest}")
    return scale


def numbered(path: Path, n: int) -> list[Path]:
    """The names of n drawings: `path` itself for a single one, NAME-1.png, NAME-2.png, ... for several."""
    return [path] if n == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(1, n + 1)]


class Drawings(Sequence[Drawing]):
    """The drawings of one caption, best first."""

    def __init__(self, drawings: Sequence[Drawing]) -> None:
        self._drawings = list(drawings)

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
        """`path` itself for a single drawing; NAME-1.png, NAME-2.png, ... for several, best first."""
        return [drawing.save(name, scale) for drawing, name in zip(self, numbered(Path(path), len(self)), strict=True)]

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows: all on one sheet, best first, in rows from left to right."""
        if len(self) < 2:
            return self[0].png() if len(self) else None
        columns = min(len(self), max(4, math.ceil(len(self) ** 0.5)))
        rows = math.ceil(len(self) / columns)
        pictures = [_enlarged(d.image, max(1, math.ceil(_BESIDE / max(d.image.size)))) for d in self]
        w, h = pictures[0].size
        sheet = Image.new("RGB", (columns * (w + _GAP) - _GAP, rows * (h + _GAP) - _GAP), "white")
        for i, picture in enumerate(pictures):
            sheet.paste(picture, (i % columns * (w + _GAP), i // columns * (h + _GAP)))
        model = self[0].model
        return _file(sheet, self.caption, model, {"seed": self.seed, "model": model})

    def __len__(self) -> int:
        return len(self._drawings)

    @overload
    def __getitem__(self, index: int) -> Drawing: ...

    @overload
    def __getitem__(self, index: slice) -> Drawings: ...

    def __getitem__(self, index: int | slice) -> Drawing | Drawings:
        found = self._drawings[index]
        return found if isinstance(found, Drawing) else Drawings(found)


def _enlarged(image: Image.Image, scale: int) -> Image.Image:
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def _file(picture: Image.Image, caption: str, model: str, facts: Mapping[str, Any]) -> bytes:
    """A PNG with caption and facts as text, and an XMP packet."""
    info, caption = PngInfo(), printable(caption)
    info.add_itxt("caption", caption)
    for key, value in facts.items():
        if value is not None:
            info.add_text(key, printable(str(value)))
    info.add_text("Software", f"limner {__version__}")
    info.add_itxt("Description", caption)
    info.add_itxt("XML:com.adobe.xmp", _xmp(caption, model))
    return image_bytes(picture, optimize=True, pnginfo=info)


def _xmp(caption: str, model: str) -> str:
    """An XMP packet (ISO 16684-1) with the IPTC digital source type."""
    return f"""<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
  <rdf:Description rdf:about=""
    xmlns:dc="http://purl.org/dc/elements/1.1/"
    xmlns:xmp="http://ns.adobe.com/xap/1.0/"
    xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/">
   <Iptc4xmpExt:DigitalSourceType>{SOURCE_TYPE}</Iptc4xmpExt:DigitalSourceType>
   <xmp:CreatorTool>limner {__version__} ({escape(printable(model))})</xmp:CreatorTool>
   <dc:description><rdf:Alt><rdf:li xml:lang="x-default">{escape(caption)}</rdf:li></rdf:Alt></dc:description>
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="r"?>"""
