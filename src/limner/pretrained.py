"""Bundled models and the search for a bundle. Does not import torch, so that help can list the models.

A bundle is a folder whose `config.json` has the format `FORMAT`; `bundles.py` reads and writes its content.
"""

from __future__ import annotations

from pathlib import Path

from limner.errors import UserError, suggestion
from limner.json_files import read_json

FORMAT = "limner-bundle-1"
ASSETS = Path(__file__).parent / "assets"  # bundled models, one folder each
DEFAULT = "scenes"


def bundled() -> dict[str, str]:
    """Return the bundled models: name and a sentence on the pictures, sorted by name."""
    folders = sorted(path for path in ASSETS.iterdir() if is_bundle(path)) if ASSETS.is_dir() else []
    return {folder.name: read_json(folder / "config.json").get("info", {}).get("about", "") for folder in folders}


def named(name_or_folder: str | Path) -> Path:
    """Return the folder of a bundled model, or the given folder. Raises `UserError` if neither exists."""
    name, names = str(name_or_folder), bundled()
    if name in names:
        return ASSETS / name
    if not Path(name).exists():
        raise UserError(
            f"there is no model {name!r}, neither as a folder nor in the package: {suggestion(name, names)}"
        )
    return Path(name)


def find(folder: str | Path) -> Path:
    """Return the bundle of a folder: the folder itself or its "bundle". Raises `UserError` if neither is a bundle."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name a bundle, or the folder that `limner train` wrote")
    for place in (folder, folder / "bundle"):
        if is_bundle(place):
            return place
    if (folder / "recipe.json").exists():
        raise UserError(f"the run in {folder} has no bundle yet: `limner train` writes it when all stages are trained")
    raise UserError(f"{folder} is not a bundle: it has no config.json that says {FORMAT!r}")


def is_bundle(folder: Path, kind: str = FORMAT) -> bool:
    """Return True if the `config.json` of a folder has the format `kind`."""
    try:
        config = read_json(folder / "config.json")
    except UserError:
        return False
    return isinstance(config, dict) and config.get("format") == kind
