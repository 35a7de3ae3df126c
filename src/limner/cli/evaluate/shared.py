"""Shared code of the commands of `limner evaluate`: the seed option, and files of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from limner.errors import UserError, printable
from limner.validation import SEEDS

CHOOSE = "Choose between models on seeds below 1,000, publish from 1,000 on."
Seed = Annotated[int, SEEDS, arg(help=f"Of the captions and their drawings. {CHOOSE}")]


def require_scenes(size: int, mend: str) -> None:
    """Raise `UserError` if pictures of `size` pixels per side cannot be scenes; `mend` ends the message."""
    from limner.tasks.scenes import UNITS

    if size % UNITS:
        raise UserError(f"scenes have a size that is a multiple of {UNITS}, this model draws {size} pixels: {mend}")


def keep(save: Callable[[Path], object], path: Path | None) -> None:
    """Call `save` with the path and print the path; do nothing without a path."""
    if path:
        save(path)
        print(f"written: {printable(path)}")
