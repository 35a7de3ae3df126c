"""Checks before training: that the models fit together, and that stages resume with unchanged settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from limner.data.stream import per_rank_batch_size
from limner.errors import UserError
from limner.json_files import read_mapping
from limner.recipes.recipe import ResolvedRecipe
from limner.runs.run_data import RunData
from limner.training.checkpoint import completed, step_of
from limner.training.config import check_resumable
from limner.training.parallel import SingleProcess
from limner.training.train_state import prepare_model


def check(run_data: RunData, stages: Sequence[str]) -> ResolvedRecipe:
    """Resolve the recipe, and build the models and optimizers on the meta device.

    Raises `UserError` if the models do not fit together, a dVAE is missing, or a stage has a checkpoint with other
    settings.
    """
    out, meta = run_data.out, torch.device("meta")
    try:
        resolved = run_data.resolve(stages)
        with meta:
            for name, stage in resolved.stages.items():
                prepare_model(resolved.models[name].build(), stage.objective, stage.training, meta, SingleProcess())
    except (ValueError, ZeroDivisionError, RuntimeError, OverflowError) as error:
        raise UserError(f"the models of the recipe do not fit together: {error}".splitlines()[0]) from None
    trained = {name: stage for name, stage in resolved.stages.items() if name in stages}
    for name, stage in trained.items():
        per_rank_batch_size(stage.training.batch_size, run_data.parallel.world_size, f"{name}.training.batch_size")
        config_file = out / name / "config.json"
        if config_file.exists() and completed(out / name):
            recorded = read_mapping(config_file)
            current = {"training": stage.training, "model": resolved.models[name], "objective": stage.objective}
            check_resumable(out / name, recorded, {**recorded, **current})
    done = completed(out / "dvae")
    unfinished = "dvae" in trained and (not done or step_of(done[-1]) < trained["dvae"].training.steps)
    if unfinished and completed(out / "prior"):
        raise UserError(f"the prior in {out} was trained on tokens of its dVAE: train another dVAE in a new folder")
    if "prior" in trained and not ("dvae" in trained or resolved.dvae_bundle or done):
        raise UserError(f"no dVAE in {out / 'dvae'}: train the stage 'dvae' first")
    return resolved
