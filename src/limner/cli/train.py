"""`limner train DATA --recipe NAME --out RUN`: a recipe, with any setting overridden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from limner import recipes
from limner.cli.arguments import parse, place
from limner.config import load_json
from limner.errors import UserError, printable
from limner.recipes.recipe import Bundled, Recipe
from limner.runs import estimate, stages


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train on image-caption data: a folder of pictures with .txt captions, JSONL, CSV or Parquet, or tar shards.

    The same command goes on after an interruption. The result is a bundle: `limner draw --model RUN`. With
    `--dvae.bundle FOLDER` any recipe takes the dVAE of a bundle, or one that `limner import` wrote, and trains none.
    """

    data: Positional[str]
    """A folder, a file or a glob (in quotes)."""
    out: Path
    """Folder of the run."""
    recipe: str
    """A recipe by name, or a recipe.json of an earlier run; its settings are the options below."""
    stages: tuple[Literal["dvae", "prior", "contrastive"], ...] = ()
    """Which stages to train; all by default."""
    settings: Annotated[Recipe, arg(name="")]


def main(argv: Sequence[str]) -> None:
    settings = find_recipe(_value_of("--recipe", argv))
    if settings is None and not {"-h", "--help"} & set(argv):
        raise UserError(f"say which recipe to train with --recipe NAME: {', '.join(recipes.NAMES)}")
    required: Any = tyro.MISSING
    settings = _borrowing(settings or recipes.get("scenes"), argv)
    default = Train(data=required, out=required, recipe=required, settings=settings)
    options = parse(Train, argv, "limner train", default)
    place(options.out, folder=True)
    dvae = options.settings.dvae
    if isinstance(dvae, Bundled) and "dvae" in options.stages:
        raise UserError(f"the dVAE is that of {dvae.bundle!r}, so none is trained: leave dvae out of --stages")
    announce = partial(estimate.tell, options.settings, options.out, smaller=recipes.smaller(options.recipe))
    bundle = stages.train_all(options.settings, options.data, options.out, options.stages or None, announce)
    print(f"the run is in {printable(options.out)}")
    if bundle is not None:
        print(f'its bundle draws: limner draw "..." --model {printable(options.out)}')


def find_recipe(name: str | None) -> Recipe | None:
    """The recipe of that name or file; None for None."""
    if name is None:
        return None
    return load_json(Recipe, name) if name.endswith(".json") else recipes.get(name)


def _borrowing(recipe: Recipe, argv: Sequence[str]) -> Recipe:
    """The recipe, with a borrowed dVAE if the arguments name one: options of its training are none then."""
    names = [word.partition("=")[0] for word in argv]
    if "--dvae.bundle" not in names or isinstance(recipe.dvae, Bundled):
        return recipe
    for name in names:
        if name.startswith("--dvae.") and name != "--dvae.bundle":
            raise UserError(
                f"{name} is for a dVAE that is trained, --dvae.bundle for one that is there: give one of them"
            )
    return replace(recipe, dvae=Bundled())


def _value_of(option: str, argv: Sequence[str]) -> str | None:
    """The value of an option that decides what the other options are."""
    for i, word in enumerate(argv):
        if word == option and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(option + "="):
            return word.removeprefix(option + "=")
    return None
