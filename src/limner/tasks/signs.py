"""Signs: pictures of a written word, as in Ramesh et al. 2021, Figure 2b, and a reader without learned parts.

A picture is uint8 [36, 36, 3]: three lines of six cells, 12 pixels high and 6 wide. Each cell is white or has a letter
of Pillow's bitmap font. Words consist of two or three syllables, so a list of words leaves most words out.
"""

from __future__ import annotations

from functools import cache
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["CELL", "SIZE", "Sign", "read_sign", "render_sign", "sample_sign", "sample_word"]

SIZE, CELL = 36, (12, 6)  # side of the picture; height and width of a cell, in pixels
INKS = {"black": (0, 0, 0), "red": (214, 40, 40), "blue": (33, 90, 190)}
_LINES, _LETTERS = SIZE // CELL[0], SIZE // CELL[1]
_VOWELS = "aeiou"
_CONSONANTS = "".join(letter for letter in ascii_lowercase if letter not in _VOWELS)
_MAX_ERROR = 180.0  # mean squared error of a readable cell: less than half the distance, 27 levels, of any two letters


class Sign(NamedTuple):
    """A sign: its word, and its color, one of `INKS`."""

    word: str
    ink: str

    @property
    def caption(self) -> str:
        """The caption, such as "red sign saying kolu"."""
        return f"{self.ink} sign saying {self.word}"


def sample_word(rng: np.random.Generator) -> str:
    """Return a word of four, five or six letters: two syllables, then nothing, a consonant or a syllable."""
    syllables = ["".join(rng.choice(list(kind)) for kind in (_CONSONANTS, _VOWELS)) for _ in range(3)]
    return "".join(syllables)[: rng.integers(4, 7)]


def sample_sign(rng: np.random.Generator, words: list[str]) -> Sign:
    """Return one of the words in a random color."""
    return Sign(words[rng.integers(len(words))], str(rng.choice(list(INKS))))


def render_sign(sign: Sign, rng: np.random.Generator) -> np.ndarray:
    """Draw a sign in a random line: uint8 [36, 36, 3]."""
    letters = _letters()
    cells = np.full((_LINES, _LETTERS, *CELL, 3), 255, np.uint8)
    cells[rng.integers(_LINES), : len(sign.word)] = [letters[letter, sign.ink] for letter in sign.word]
    return cells.swapaxes(1, 2).reshape(SIZE, SIZE, 3)


def read_sign(picture: np.ndarray) -> Sign | None:
    """Return what a picture, uint8 [36, 36, 3], says. None if a cell is neither white nor a letter, or if the letters
    are not one word of one color."""
    cells = picture.reshape(_LINES, CELL[0], _LETTERS, CELL[1], 3).swapaxes(1, 2).reshape(-1, *CELL, 3)
    templates = {(" ", ""): np.full((*CELL, 3), 255, np.uint8), **_letters()}
    known = np.stack(list(templates.values())).astype(np.float32)
    errors = np.square(cells[:, None].astype(np.float32) - known).mean((2, 3, 4))
    if errors.min(1).max() > _MAX_ERROR:
        return None
    names = list(templates)
    found = [names[i] for i in errors.argmin(1)]
    text = "\n".join("".join(letter for letter, _ in found[i : i + _LETTERS]) for i in range(0, len(found), _LETTERS))
    words, inks = text.split(), {ink for _, ink in found if ink}
    return Sign(words[0], inks.pop()) if len(words) == len(inks) == 1 else None


@cache
def _letters() -> dict[tuple[str, str], np.ndarray]:
    """Return the cell of each letter in each color."""
    font, cells = ImageFont.load_default_imagefont(), dict[tuple[str, str], np.ndarray]()
    for letter in ascii_lowercase:
        for ink, color in INKS.items():
            cell = Image.new("RGB", (CELL[1], CELL[0]), "white")
            ImageDraw.Draw(cell).text((0, 0), letter, fill=color, font=font)
            cells[letter, ink] = np.asarray(cell)
    return cells
