"""Data set of real pictures: every emoji of an installed color-emoji font, with its name.

The names are Unicode's English short names (`emoji` package). The pictures come from the font, square, on
white. The data set is small but structured: most people and professions come in five skin tones and several
genders, so combinations can be held out of training.

Split. A toned emoji is a pair (base, tones), such as ("woman firefighter", "medium"). About a tenth of
the pairs are held out, chosen by a hash of the pair, never more than half of those of a base. Untoned
emoji are always in training. So every base and every tone occurs in training.

Shaping. "Woman firefighter: medium skin tone" is four code points that the font's ligature table
turns into one glyph, and flags are two. That needs a shaping engine (Raqm, in Pillow's wheels). A
sequence that the font does not know renders as several glyphs side by side, and is left out.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from limner.data.area_resize import area_resize
from limner.data.image_encode import image_bytes
from limner.data.sample import Rejected
from limner.data.shard_writer import ShardWriter
from limner.errors import UserError
from limner.progress import Advance

_TONE = re.compile(r" (light|medium-light|medium|medium-dark|dark) skin tone\b")
_TONE_CODES = range(0x1F3FB, 0x1F400)
_PERSON, _CHILD, _ELDER = "\U0001f9d1", "\U0001f9d2", "\U0001f9d3"
#: Maps people to gender-neutral ones by age; removes signs of gender, hair, direction and tone.
_NEUTRAL = str.maketrans(
    {
        **dict.fromkeys("\U0001f468\U0001f469", _PERSON),
        **dict.fromkeys("\U0001f466\U0001f467", _CHILD),
        **dict.fromkeys("\U0001f474\U0001f475", _ELDER),
        **dict.fromkeys("\u2640\u2642\u27a1\ufe0f\U0001f9b0\U0001f9b1\U0001f9b2\U0001f9b3", None),
        **dict.fromkeys(map(chr, _TONE_CODES), None),
    }
)
FONT_PATHS = (  # usual paths, for systems without fontconfig
    "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/google-noto-emoji/NotoColorEmoji.ttf",
    "/usr/share/fonts/google-noto-color-emoji-fonts/NotoColorEmoji.ttf",
    "/usr/local/share/fonts/NotoColorEmoji.ttf",
    "/System/Library/Fonts/Apple Color Emoji.ttc",
)
_FONT_SIZES = (109, 160, 128, 136, 96, 64)  # bitmap fonts exist at fixed sizes: Noto's is 109, Apple's 160
_INSTALL_HINT = "install one (Debian, Ubuntu: apt-get install fonts-noto-color-emoji) or name a font file"


@dataclass(frozen=True)
class Emoji:
    """A fully qualified emoji: its code points, its English short name and other names."""

    text: str
    name: str
    aliases: tuple[str, ...] = ()

    @property
    def tones(self) -> tuple[str, ...]:
        """The skin tones, in the order of the people."""
        return tuple(_TONE.findall(self.name))

    @property
    def base(self) -> str:
        """The name without the tones: "woman firefighter"."""
        return _TONE.sub("", self.name)

    @property
    def is_flag(self) -> bool:
        """True for the flag of a country (two regional indicators); its name is only the country."""
        return all(0x1F1E6 <= ord(c) <= 0x1F1FF for c in self.text)

    @property
    def family(self) -> str:
        """Hexadecimal code points, equal for all variants of tone, gender, hair and direction."""
        parts = [part for part in self.text.translate(_NEUTRAL).split("\u200d") if part]
        return "-".join(f"{ord(character):x}" for part in parts for character in part)

    @property
    def captions(self) -> tuple[str, ...]:
        """Captions, the plain name first."""
        if self.is_flag:
            return (f"flag of {self.name}", f"{self.name} flag")
        if not self.tones:
            return (self.name, f"{self.name} emoji")
        tones = " and ".join(dict.fromkeys(self.tones))
        return (self.name, f"{self.base} with {tones} skin tone", f"{self.base}, {tones} skin")


def all_emoji() -> list[Emoji]:
    """Return every fully qualified emoji of the `emoji` package, in a fixed order. Raises `UserError` without it."""
    try:
        import emoji
    except ImportError:
        raise UserError('emoji names need the emoji package: pip install "limner[data]"') from None
    return [
        Emoji(text, _plain(entry["en"]), tuple(map(_plain, entry.get("alias", ()))))
        for text, entry in sorted(emoji.EMOJI_DATA.items())
        if entry["status"] == emoji.STATUS["fully_qualified"]
    ]


def _plain(name: str) -> str:
    """Return a name as plain text: ":man’s_shoe:" -> "man's shoe"."""
    name = name.strip(":").replace("_", " ").replace("’", "'")
    return unicodedata.normalize("NFC", " ".join(name.split()))


def assign_splits(emoji: list[Emoji]) -> list[str]:
    """Return "train" or "held-out" for each emoji (see the module docstring)."""
    variants: dict[str, list[tuple[str, Emoji]]] = {}
    for item in emoji:
        if item.tones:
            rank = hashlib.sha256(f"{item.base}|{'|'.join(item.tones)}".encode()).hexdigest()
            variants.setdefault(item.base, []).append((rank, item))
    held_out = set()
    for ranked in variants.values():
        chosen = [item for rank, item in sorted(ranked, key=itemgetter(0)) if int(rank, 16) % 10 == 0]
        held_out |= set(chosen[: len(ranked) // 2])
    return ["held-out" if item in held_out else "train" for item in emoji]


def find_font() -> Path:
    """Find a color-emoji font with fontconfig or at the usual paths. Raises `UserError` without one."""
    lines: list[str] = []
    if program := shutil.which("fc-list"):
        result = subprocess.run([program, ":color=true", "file", "family"], capture_output=True, text=True, check=False)
        lines = [line for line in result.stdout.splitlines() if "emoji" in line.lower()]
        lines.sort(key=lambda line: ("NotoColorEmoji" not in line, line))
    for name in (*(line.split(": ")[0].rstrip(":") for line in lines), *FONT_PATHS):
        path = Path(name)
        if path.suffix.lower() in (".ttf", ".ttc", ".otf") and path.is_file():
            return path
    raise UserError(f"no color-emoji font is installed: {_INSTALL_HINT}")


class EmojiRenderer:
    """Renderer of emoji in one font. Raises `UserError` for an unusable font or shaping engine."""

    def __init__(self, font: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(font) if font else find_font()
        if not self.path.is_file():
            raise UserError(f"font file {self.path} does not exist: {_INSTALL_HINT}")
        for size in _FONT_SIZES:
            with suppress(OSError):  # "invalid pixel size": not a size of this bitmap font, or not a font
                self.font = ImageFont.truetype(self.path, size, layout_engine=ImageFont.Layout.RAQM)
                break
        else:
            raise UserError(f"{self.path} is not a readable font: {_INSTALL_HINT}")
        self.em = self.font.getlength("\U0001f600")
        self._missing_glyph = self._render_glyph("\U0010fffe").tobytes()
        face = np.asarray(self._render_glyph("\U0001f600").convert("RGB")).astype(int)
        if np.ptp(face, axis=2).max() < 64:
            raise UserError(f"{self.path} is not a color-emoji font: {_INSTALL_HINT}")
        if self.font.getlength("\U0001f469\u200d\U0001f692") > 1.5 * self.em:
            raise UserError(
                "Pillow cannot shape emoji of several code points: install libfribidi "
                "(Debian, Ubuntu: apt-get install libfribidi0) and Pillow from a wheel"
            )

    def _render_glyph(self, text: str) -> Image.Image:
        left, top, right, bottom = map(round, self.font.getbbox(text))
        side = max(round(self.em), right - left, bottom - top, 1)
        canvas = Image.new("RGB", (side, side), "white")
        corner = ((side - right + left) // 2 - left, (side - bottom + top) // 2 - top)
        ImageDraw.Draw(canvas).text(corner, text, font=self.font, embedded_color=True)
        return canvas

    def render(self, text: str, size: int) -> np.ndarray:
        """Render an emoji on white, uint8 [size, size, 3].

        Raises `Rejected` for a missing glyph ("not in the font") or several ("not one glyph").
        """
        if self.font.getlength(text) > 1.5 * self.em:
            raise Rejected("not one glyph")
        picture = self._render_glyph(text)
        if picture.tobytes() == self._missing_glyph:
            raise Rejected("not in the font")
        return area_resize(np.asarray(picture), size, size)


def write_emoji(
    out: str | os.PathLike[str],
    size: int = 64,
    font: str | os.PathLike[str] | None = None,
    progress: Advance | None = None,
) -> dict[str, Any]:
    """Write every emoji that the font can draw to shards in `out`, as PNGs of `size` pixels per side. Return a summary.

    The metadata of a sample: emoji, name, base, tones, family, split. Raises `UserError` without a
    color-emoji font or a shaping engine, or if `out` is not empty.
    """
    renderer, every_emoji = EmojiRenderer(font), all_emoji()
    with ShardWriter(out) as writer:
        for emoji, split in zip(every_emoji, assign_splits(every_emoji), strict=True):
            try:
                picture = renderer.render(emoji.text, size)
            except Rejected as rejection:
                writer.counts.rejected[rejection.reason] += 1
            else:
                meta = {
                    "emoji": emoji.text, "name": emoji.name, "base": emoji.base,
                    "tones": emoji.tones, "family": emoji.family, "split": split,
                }  # fmt: skip
                writer.write(image_bytes(picture), emoji.captions, meta)
            if progress:
                progress(1)
    return writer.summary()
