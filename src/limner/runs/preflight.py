"""Checks before training: that the models fit together, and that stages resume with unchanged settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from limner.data.stream import share_of
from limner.errors import UserError
from limner.json_files import read_mapping
from limner.recipes.recipe import (
    AnyStage,
    PretrainedDVAE,
    resolve_contrastive_config,
    resolve_dvae_config,
    resolve_prior_config,
)
from limner.runs.run_data import Material
from limner.training.checkpoint import completed, step_of
from limner.training.config import refuse_changes
from limner.training.parallel import Single
from limner.training.train_state import set_up


def check(material: Material, stages: Sequence[str]) -> None:
    """Build the models and optimizers on the meta device. Raises `UserError` if the models do not fit together, or if a
    stage has a checkpoint with other settings."""
    recipe, out = material.recipe, material.out
    found: dict[str, tuple[AnyStage, Any]] = {}
    try:
        pictures = resolve_dvae_config(recipe)
        if not isinstance(recipe.dvae, PretrainedDVAE):
            found["dvae"] = recipe.dvae, pictures
        known = material.known_tokenizer()
        vocab = known.vocab_size if known else recipe.text.vocab
        found["prior"] = recipe.prior, resolve_prior_config(recipe.prior, recipe.text, vocab, pictures)
        fitted = resolve_contrastive_config(recipe.contrastive, recipe.text, vocab, pictures)
        found["contrastive"] = recipe.contrastive, fitted
        with torch.device("meta"):
            for stage, config in found.values():
                set_up(config.build(), stage.objective, stage.training, torch.device("meta"), Single())
    except (ValueError, ZeroDivisionError, RuntimeError, OverflowError) as error:
        raise UserError(f"the recipe describes no models that fit together: {error}".splitlines()[0]) from None
    for name, (stage, config) in found.items():
        if name in stages:
            share_of(stage.training.batch_size, material.parallel.world, f"{name}.training.batch_size")
        saved = out / name / "config.json"
        if name in stages and saved.exists() and completed(out / name):
            ours = {"training": stage.training, "model": config, "objective": stage.objective}
            before = read_mapping(saved)
            refuse_changes(out / name, before, {**before, **ours})
    if "dvae" in stages and not isinstance(recipe.dvae, PretrainedDVAE) and completed(out / "prior"):
        done = completed(out / "dvae")
        if not done or step_of(done[-1]) < recipe.dvae.training.steps:
            raise UserError(
                f"the prior in {out} has learned from its dVAE as it is: train another dVAE in a new folder"
            )
