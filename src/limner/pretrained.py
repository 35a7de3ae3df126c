"""Which models come with the package, and where a bundle is. Without torch, so that help can name them.

A bundle is a folder whose `config.json` says so; `bundles.py` reads and writes what is in it.
"""

from __future__ import annotations

from pathlib import Path

from limner.errors import UserError, suggestion
from limner.json_files import read_json

FORMAT = "limner-bundle-1"
ASSETS = Path(__file__).parent / "assets"  # bundles that come with the package, a folder each
DEFAULT = "scenes"


def bundled() -> dict[str, str]:
    """Names of the models that come with the package, in order, with a sentence of what each draws."""
    folders = sorted(path for path in ASSETS.iterdir() if is_bundle(path)) if ASSETS.is_dir() else []
    return {folder.name: read_json(folder / "config.json").get("info", {}).get("about", "") for folder in folders}


def named(name_or_folder: str | Path) -> Path:
    """The folder of a bundle that comes with the package, by name, or the folder that is named."""
    name, names = str(name_or_folder), bundled()
    if name in names:
        return ASSETS / name
    if not Path(name).exists():
        raise UserError(
            f"there is no model {name!r}, neither as a folder nor in the package: {suggestion(name, names)}"
        )
    return Path(name)


def find(folder: str | Path) -> Path:
    """The bundle in a folder: itself, or that of the run in it. Raises `UserError` if there is none."""
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
    """Whether a folder says that it holds what `kind` names."""
    try:
        config = read_json(folder / "config.json")
    except UserError:
        return False
    return isinstance(config, dict) and config.get("format") == kind
