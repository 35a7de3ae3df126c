"""Record files in the stage folders of a run."""

from __future__ import annotations

from pathlib import Path


def records(run: Path, file: str) -> dict[str, Path]:
    """Return the files named `file` in the stages of a run, by stage title; "" if `run` is a stage folder."""
    from limner.recipes.recipe import STAGE_TITLES

    by_title = {title: path for name, title in STAGE_TITLES.items() if (path := run / name / file).exists()}
    return by_title | ({"": run / file} if (run / file).exists() else {})
