"""Recipes: Python functions that return a full configuration. `get(name)` looks one up by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limner.errors import UserError, suggestion

if TYPE_CHECKING:
    from limner.recipes.recipe import Recipe

# name -> one line of help; `presets.py` has a function of the same name, or `paper` and `clip` for sizes
NAMES = {
    "demo": "what `limner demo` trains: a small prior and contrastive model over the bundled dVAE",
    "scenes": "48 x 48 pictures of the scenes world, 12 x 12 tokens, in three hours on two cores",
    "emoji": "64 x 64 emoji, 8 x 8 tokens",
    "icons": "drawings by several artists, 64 x 64, from icon sets; learns them by heart, and no new combinations yet",
    "laptop": "64 x 64 pictures of your own, 16 x 16 tokens, of a size for two cores",
    "photos": "128 x 128 pictures of your own, 16 x 16 tokens, of a size for one GPU",
    "tiny": "the paper's method, 256 x 256, 32 x 32 tokens, with a prior of 5 million parameters in its blocks",
    "small": "the same with 25 million",
    "base": "the same with 113 million",
    "large": "the same with 302 million",
    "xl": "the same with 1.2 billion",
    "dalle-3b": "the same with 2.8 billion (Table 1)",
    "dalle-6b": "the same with 5.5 billion (Table 1)",
    "dalle-12b": "the paper's own: 12 billion",
    "clip-b": "a contrastive model alone, ViT-B/32, as Wortsman et al. 2023 train it (with --stages contrastive)",
    "clip-l": "the same, ViT-L/14",
    "clip-h": "the same, ViT-H/14",
}


def smaller(name: str) -> str | None:
    """What to train on two cores instead of a recipe of that name; None for those that are made for them."""
    names = list(NAMES)
    return "laptop" if name in names[names.index("photos") :] else None


def get(name: str) -> Recipe:
    """The recipe of that name. Raises `UserError` with the nearest name if there is none."""
    if name not in NAMES:
        raise UserError(f"there is no recipe {name!r}: {suggestion(name, NAMES)}")
    from limner.recipes import presets

    if name.startswith("clip-"):
        return presets.clip(name.removeprefix("clip-").upper())
    return getattr(presets, name)() if hasattr(presets, name) else presets.paper(name)
