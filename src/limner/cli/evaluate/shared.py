"""Shared code of the commands of `limner evaluate`: the seed option, and files of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from limner.errors import UserError, escape_control
from limner.validation import SEEDS

SEED_RANGES = "Compare models with seeds below 1,000; publish results of seeds from 1,000 on."
Seed = Annotated[int, SEEDS, arg(help=f"Seed of the captions and their drawings. {SEED_RANGES}")]


def require_scenes(size: int, advice: str) -> None:
    """Raise `UserError` if pictures of `size` pixels per side cannot be scenes; `advice` ends the message."""
    from limner.tasks.scenes import UNITS

    if size % UNITS:
        raise UserError(f"the size of scenes is a multiple of {UNITS} pixels, this model draws {size} pixels: {advice}")


def write_result(save: Callable[[Path], object], path: Path | None) -> None:
    """Call `save` with the path and print the path; do nothing without a path."""
    if path:
        save(path)
        print(f"written: {escape_control(path)}")
