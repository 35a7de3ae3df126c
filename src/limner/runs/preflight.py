"""Checks before training: that the models fit together, and that stages resume with unchanged settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from limner.data.stream import per_rank_batch_size
from limner.errors import UserError
from limner.json_files import read_mapping
from limner.recipes.recipe import (
    AnyStage,
    PretrainedDVAE,
    resolve_contrastive_config,
    resolve_dvae_config,
    resolve_prior_config,
)
from limner.runs.run_data import RunData
from limner.training.checkpoint import completed, step_of
from limner.training.config import check_resumable
from limner.training.parallel import SingleProcess
from limner.training.train_state import prepare_model


def check(run_data: RunData, stages: Sequence[str]) -> None:
    """Build the models and optimizers on the meta device. Raises `UserError` if the models do not fit together, or if a
    stage has a checkpoint with other settings."""
    recipe, out = run_data.recipe, run_data.out
    stage_configs: dict[str, tuple[AnyStage, Any]] = {}
    try:
        dvae = resolve_dvae_config(recipe)
        if not isinstance(recipe.dvae, PretrainedDVAE):
            stage_configs["dvae"] = recipe.dvae, dvae
        tokenizer = run_data.existing_tokenizer()
        vocab = tokenizer.vocab_size if tokenizer else recipe.text.vocab
        stage_configs["prior"] = recipe.prior, resolve_prior_config(recipe.prior, recipe.text, vocab, dvae)
        contrastive = resolve_contrastive_config(recipe.contrastive, recipe.text, vocab, dvae)
        stage_configs["contrastive"] = recipe.contrastive, contrastive
        with torch.device("meta"):
            for stage, config in stage_configs.values():
                prepare_model(config.build(), stage.objective, stage.training, torch.device("meta"), SingleProcess())
    except (ValueError, ZeroDivisionError, RuntimeError, OverflowError) as error:
        raise UserError(f"the models of the recipe do not fit together: {error}".splitlines()[0]) from None
    for name, (stage, config) in stage_configs.items():
        if name in stages:
            per_rank_batch_size(stage.training.batch_size, run_data.parallel.world_size, f"{name}.training.batch_size")
        config_file = out / name / "config.json"
        if name in stages and config_file.exists() and completed(out / name):
            current = {"training": stage.training, "model": config, "objective": stage.objective}
            recorded = read_mapping(config_file)
            check_resumable(out / name, recorded, {**recorded, **current})
    if "dvae" in stages and not isinstance(recipe.dvae, PretrainedDVAE) and completed(out / "prior"):
        done = completed(out / "dvae")
        if not done or step_of(done[-1]) < recipe.dvae.training.steps:
            raise UserError(f"the prior in {out} was trained on tokens of its dVAE: train another dVAE in a new folder")
