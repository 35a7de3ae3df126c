"""Small data, a recipe of three stages that trains within a second, and a demonstration."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from limner.config import save_json
from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.recipes import get
from limner.recipes.recipe import Recipe
from limner.tasks.build_scenes import SceneDataSettings, write_scenes


def recipe(steps: int = 4, every: int = 2) -> Recipe:
    """Three stages of a few steps, with all that a checkpoint has to know: averages, Muon, AdamW, schedules, dropout
    of merges and of captions, evaluation, micro-batches."""
    scenes = get("scenes")
    often: dict[str, Any] = {
        "steps": steps, "batch_size": 4, "warmup_steps": 1, "eval_every": 2, "log_every": 1, "checkpoint_every": every,
        "keep": 2,
    }  # fmt: skip
    patches: Any = get("laptop").dvae
    dvae = PatchDVAEConfig(size=24, vocab=32, width=8, blocks=1)
    return replace(
        scenes,
        text=replace(scenes.text, vocab=300, dropout=0.1),
        dvae=replace(patches, model=dvae, augment=False, training=replace(patches.training, **often)),
        prior=replace(
            scenes.prior,
            model=TransformerConfig(width=32, depth=2, heads=2),
            # One report and evaluation, at the end: with these the prior takes over the threads of a contrastive model
            # that has finished, which can change rounding.
            training=replace(scenes.prior.training, **{**often, "log_every": 100, "eval_every": 100}, accumulate=2),
            caption_dropout=0.1,
        ),
        contrastive=replace(
            scenes.contrastive,
            model=CLIPConfig(patch=8, width=32, depth=1, heads=2, embedding=16),
            training=replace(scenes.contrastive.training, **{**often, "batch_size": 8}),
        ),
    )


def world(folder: Path, count: int = 24) -> None:
    """`folder/data`, `folder/recipe.json`: what `limner train data --recipe recipe.json --out run` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_scenes(folder / "data", SceneDataSettings(count=count, size=24, held_out=0.2))
    save_json(recipe(), folder / "recipe.json")


TRAIN = ("train", "data", "--recipe", "recipe.json", "--out", "run")
DEMO = ("demo", "--out", "demo", "--from-scratch", "--scenes", 8, "--captions", 1, "--candidates", 2, "--evaluated", 1)
#: Environment that makes `small` act in a child of the server.
SMALL = {"LIMNER_ATTACK_SMALL": "1"}


def small() -> None:
    """Reduce sizes without an option in this process: the recipe of `limner demo`, the number of emoji."""
    if not os.environ.get("LIMNER_ATTACK_SMALL"):
        return
    from limner.cli import demo
    from limner.tasks import emoji

    tiny = recipe(steps=1, every=1)
    everything = emoji.all_emoji
    emoji.all_emoji = lambda: everything()[:3_000:125]
    demo.Demo.recipe = lambda self: tiny


def ground_for_imports(folder: Path) -> None:
    """`folder/encoder.pt`, `folder/decoder.safetensors` with OpenAI's names, `folder/clip.safetensors` and
    `folder/merges.txt` of a published CLIP model, and `folder/pictures` with captions."""
    from published_clip import write_merges, write_weights

    write_weights(folder / "clip.safetensors", (16, 8, (64, 1), (64, 1), 16, 520))
    write_merges(folder / "merges.txt", 6)
    torch.manual_seed(0)
    model = DVAEConfig(size=32, width=16, groups=4, blocks=1, vocab=64, code_width=8).build()
    torch.save(model.encoder.state_dict(), folder / "encoder.pt")
    save_file({k: v.contiguous() for k, v in model.decoder.state_dict().items()}, folder / "decoder.safetensors")
    (folder / "pictures").mkdir()
    noise = np.random.default_rng(0)
    for i in range(8):
        pixels = noise.integers(0, 256, (30 + i, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{i}.png")
        (folder / "pictures" / f"{i}.txt").write_text(f"picture {i} of many colors in a row")
