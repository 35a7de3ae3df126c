"""Write monochrome icons to disk as a data set: `limner data glyphs OUT FILE...`.

A first pass draws all icons, set after set, and keeps their PNGs, about 200 MB for 230,000 icons. A second one selects
subjects in several styles, finds equal pictures, measures what each style looks like, assigns splits and writes shards.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from PIL import Image

from limner.data.image_encode import image_bytes
from limner.data.sample import Rejected
from limner.data.shard_writer import ShardWriter
from limner.errors import UserError
from limner.progress import Advance
from limner.tasks.glyphs import Glyph, assign_splits, captions, describe_style, glyphs_of, select
from limner.tasks.iconify import IconSet
from limner.tasks.icons import stable_hash
from limner.tasks.svg import SVGRenderer
from limner.validation import Range, Validated

_LIGHTEST = 239  # darkest gray level of a picture that counts as empty
_MEASURED = 200  # drawings of a style that `describe_style` measures


@dataclass(frozen=True, kw_only=True)
class GlyphDataSettings(Validated):
    """Settings of a data set of monochrome icons."""

    size: Annotated[int, Range(16, 1_024)] = 48
    """Side of the pictures in pixels."""
    styles: Annotated[int, Range(1, 1_000)] = 3
    """Leave out subjects that exist in fewer styles: from one or two drawings a model cannot tell subject and style
    apart."""


def write_glyphs(
    out: str | os.PathLike[str],
    sets: Iterable[IconSet],
    settings: GlyphDataSettings = GlyphDataSettings(),
    progress: Advance | None = None,
) -> dict[str, Any]:
    """Write shards of PNG, captions and metadata. Return a summary with the number of subjects, styles and splits.

    `progress` is called with 1 after every drawing. Raises `UserError` if no drawing is left.
    """
    with ShardWriter(out) as writer:
        with SVGRenderer() as renderer:
            drawn = list(_draw(sets, settings.size, renderer, writer, progress or (lambda _: None)))
        glyphs, pictures = [glyph for glyph, _ in drawn], [picture for _, picture in drawn]
        pixels = [hashlib.sha256(picture).digest()[:16] for picture in pictures]
        kept = select(glyphs, pixels, settings.styles, writer.counts.rejected)
        if not kept:
            raise UserError(f"no subject exists in {settings.styles} styles: name more sets, or reduce --styles")
        looks = _looks([(glyphs[i].style, pictures[i]) for i in kept])
        chosen = [replace(glyphs[i], look=looks[glyphs[i].style]) for i in kept]
        kinds = Counter[str]()
        for glyph, i in zip(assign_splits(chosen, [pixels[i] for i in kept]), kept, strict=True):
            writer.write(pictures[i], captions(glyph), glyph.metadata)
            kinds[glyph.held_out or "train"] += 1
    return {
        **writer.summary(), "subjects": len({glyph.subject for glyph in chosen}), "styles": looks, "kinds": dict(kinds)
    }  # fmt: skip


def _draw(
    sets: Iterable[IconSet], size: int, renderer: SVGRenderer, writer: ShardWriter, progress: Advance
) -> Iterator[tuple[Glyph, bytes]]:
    """Yield the drawings of all sets with their PNGs; count those that cannot be drawn."""
    for icon_set in sets:
        for glyph in glyphs_of(icon_set, writer.counts.rejected):
            try:
                picture = renderer.render(icon_set.svg(glyph.icon), size)[..., 0]
                if picture.min() > _LIGHTEST:
                    raise Rejected("empty drawing")
                yield glyph, image_bytes(picture)
            except Rejected as rejection:
                writer.counts.rejected[rejection.reason] += 1
            progress(1)


def _looks(pictures: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Describe each style by some of its drawings, pairs of style and PNG."""
    by_style = defaultdict[str, list[bytes]](list)
    for style, picture in pictures:
        by_style[style].append(picture)
    rngs = {style: np.random.default_rng(stable_hash("look", style)) for style in by_style}
    return {
        style: describe_style(
            np.asarray(Image.open(io.BytesIO(pngs[i]))) for i in rngs[style].permutation(len(pngs))[:_MEASURED]
        )
        for style, pngs in sorted(by_style.items())
    }
