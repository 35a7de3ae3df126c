"""Bundled models and the search for a bundle. Does not import torch, so that help can list the models.

A bundle is a folder whose `config.json` has the format `FORMAT`; `bundles.py` reads and writes its content.
"""

import warnings
from pathlib import Path

from limner.errors import UserError, did_you_mean
from limner.json_files import read_json

FORMAT = "limner-bundle-1"
ASSETS = Path(__file__).parent / "assets"  # bundled models, one folder each
DEFAULT = "scenes"


def list_pretrained() -> dict[str, str]:
    """Return the bundled models: name and a sentence on the pictures, sorted by name."""
    folders = sorted(path for path in ASSETS.iterdir() if is_bundle(path)) if ASSETS.is_dir() else []
    return {folder.name: read_json(folder / "config.json").get("info", {}).get("about", "") for folder in folders}


def resolve_name(name_or_folder: str | Path) -> Path:
    """Return the folder of a bundled model, or the given folder. Raises `UserError` if neither exists.

    Warns if the name of a bundled model is also a folder with a model, which it hides.
    """
    name, names = str(name_or_folder), list_pretrained()
    if name in names:
        if _bundle_in(Path(name)):
            warnings.warn(f"{name!r} is the bundled model; for the folder of this name, write ./{name}", stacklevel=3)
        return ASSETS / name
    if not Path(name).exists():
        raise UserError(f"unknown model {name!r}, neither a folder nor a bundled model: {did_you_mean(name, names)}")
    return Path(name)


def find_bundle(folder: str | Path) -> Path:
    """Return the bundle of a folder: the folder itself or its "bundle". Raises `UserError` if neither is a bundle."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name a bundle or a folder that `limner train` wrote")
    if bundle := _bundle_in(folder):
        return bundle
    if (folder / "recipe.json").exists():
        raise UserError(
            f"the run in {folder} is incomplete: `limner train` writes its bundle when all stages are trained"
        )
    raise UserError(f"{folder} is not a bundle: it lacks a config.json with the format {FORMAT!r}")


def _bundle_in(folder: Path) -> Path | None:
    """Return the folder or its "bundle", whichever is a bundle; None if neither is."""
    return next((candidate for candidate in (folder, folder / "bundle") if is_bundle(candidate)), None)


def is_bundle(folder: Path, kind: str = FORMAT) -> bool:
    """Return True if the `config.json` of a folder has the format `kind`."""
    try:
        config = read_json(folder / "config.json")
    except UserError:
        return False
    return isinstance(config, dict) and config.get("format") == kind
