"""The records that the stages of a run leave in their folders."""

from __future__ import annotations

from pathlib import Path


def records(run: Path, file: str) -> dict[str, Path]:
    """Files of that name in the stages of a run, by the titles of these; "" if the folder is a stage's itself."""
    from limner.recipes.recipe import STAGE_TITLES

    found = {title: path for name, title in STAGE_TITLES.items() if (path := run / name / file).exists()}
    return found | ({"": run / file} if (run / file).exists() else {})
