"""Recipes: named configurations of all training stages. `get(name)` builds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limner.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from limner.recipes.recipe import Recipe

__all__ = ["SUMMARIES", "fallback_recipe", "get"]

# name -> line of help. `presets.py` has a function of the same name, or `paper` and `clip` with sizes.
SUMMARIES = {
    "demo": "small prior and contrastive model over the bundled dVAE, for `limner demo`",
    "scenes": "48 x 48 synthetic scenes, 12 x 12 tokens, in three hours on two cores",
    "emoji": "64 x 64 emoji, 8 x 8 tokens",
    "icons": "64 x 64 icons of several artists; memorizes its training pictures, cannot draw new combinations yet",
    "glyphs": "48 x 48 monochrome icons, 12 x 12 tokens, also subjects in styles that training lacks",
    "laptop": "64 x 64 pictures of your own, 16 x 16 tokens, for two cores",
    "photos": "128 x 128 pictures of your own, 16 x 16 tokens, for one GPU",
    "tiny": "the paper's method, 256 x 256, 32 x 32 tokens, with 5 million parameters in the prior's blocks",
    "small": "the same with 25 million",
    "base": "the same with 113 million",
    "large": "the same with 302 million",
    "xl": "the same with 1.2 billion",
    "dalle-3b": "the same with 2.8 billion (Table 1)",
    "dalle-6b": "the same with 5.5 billion (Table 1)",
    "dalle-12b": "the same with 12 billion, the paper's model",
    "clip-b": "only a contrastive model, ViT-B/32, as Wortsman et al. 2023 train it (with --stages contrastive)",
    "clip-l": "the same, ViT-L/14",
    "clip-h": "the same, ViT-H/14",
}


def fallback_recipe(name: str) -> str | None:
    """Name of a recipe to train on two cores instead of the given one; None if that suits two cores itself."""
    names = list(SUMMARIES)
    return "laptop" if name in names[names.index("photos") :] else None


def get(name: str) -> Recipe:
    """Build the recipe of that name. Raises `UserError`, which suggests the closest name, for an unknown name."""
    if name not in SUMMARIES:
        raise UserError(f"unknown recipe {name!r}: {did_you_mean(name, SUMMARIES)}")
    from limner.recipes import presets

    if name.startswith("clip-"):
        return presets.clip(name.removeprefix("clip-").upper())
    return getattr(presets, name)() if hasattr(presets, name) else presets.paper(name)
