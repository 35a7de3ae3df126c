"""Run a recipe: tokenizer, dVAE, prior, contrastive model, bundle.

    RUN/recipe.json   RUN/environment.yml   RUN/tokenizer.json
    RUN/dvae/   RUN/tokens/   RUN/prior/   RUN/contrastive/   RUN/bundle/

A finished stage is loaded and an interrupted stage resumes, so repeating the command after Ctrl-C or a crash
continues the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import get_args

import torch

from limner.atomic_io import atomic_write_text, exclusive_lock
from limner.config import save_json, to_dict
from limner.data.stream import per_rank_batch_size
from limner.errors import UserError
from limner.json_files import read_mapping
from limner.pipeline import TextToImage
from limner.recipes.recipe import STAGE_TITLES, Recipe, ResolvedRecipe, Stage
from limner.runs.environment import environment_file
from limner.runs.parallel_stage import contrastive_in_parallel, trains_in_parallel
from limner.runs.run_data import RunData
from limner.runs.stages import StageHooks, StageTrainer
from limner.training.checkpoint import completed, skipped_updates, step_of
from limner.training.config import check_resumable
from limner.training.parallel import CANNOT_FREEZE, Parallel, SingleProcess
from limner.training.train_state import SKIPPED, prepare_model

__all__ = ["train_all"]


def train_all(
    recipe: Recipe,
    data: str | Path,
    out: str | Path,
    stages: Sequence[Stage] | None = None,
    on_start: Callable[[ResolvedRecipe, Sequence[Stage]], object] | None = None,
    parallel: Parallel | None = None,
    stage_hooks: StageHooks | None = None,
) -> TextToImage | None:
    """Train the stages (default: all) and write `out/bundle`.

    Returns the bundle on the first process once all three models exist, else None. `on_start` is called with the
    resolved recipe and the stages after the checks. Raises `UserError` if the stages cannot be trained, or after
    writing if most updates of a stage were skipped. On a CPU with several threads the prior and the contrastive model
    train in parallel, unless `stage_hooks` returns more hooks for the folder of a stage. With several processes
    (`parallel`) all train every stage together, and the first writes the files.
    """
    parallel, selected, out = parallel or SingleProcess(), stages or get_args(Stage), Path(out)
    run_data = RunData.open(recipe, data, out, parallel)
    with exclusive_lock(out) if parallel.is_main else nullcontext(-1) as lock, _check_skipped(out, selected, parallel):
        resolved = _check(run_data, selected)
        with parallel.main_first():
            if parallel.is_main:
                save_json(recipe, out / "recipe.json")
                if not (environment := out / "environment.yml").exists():
                    atomic_write_text(environment, environment_file())
            attribution = run_data.save_attribution()
            if on_start and parallel.is_main:
                on_start(resolved, selected)
        trainer = StageTrainer(run_data, selected, stage_hooks)
        dvae = trainer.model("dvae")
        if trainer.tokenizer is None:
            return None
        parallel_allowed = parallel.world_size == 1 and not torch.are_deterministic_algorithms_enabled()
        in_parallel = parallel_allowed and stage_hooks is None and trains_in_parallel(selected, trainer.device)
        with contrastive_in_parallel(recipe, data, out, lock) if in_parallel else nullcontext() as hook:
            prior = trainer.model("prior", [hook] if hook else [])
        contrastive = trainer.load("contrastive") if in_parallel else trainer.model("contrastive")
        if dvae is None or prior is None or contrastive is None:
            return None
        info = {
            "data": Path(data).name,
            "samples": len(run_data.train),
            "recipe": to_dict(recipe),
            "temperature": recipe.prior.temperature,
            "guidance": recipe.prior.guidance,
            "prior_score_weight": recipe.contrastive.prior_score_weight,
            "candidates": recipe.contrastive.candidates,
            **({"attribution": attribution} if attribution else {}),
        }
        examples = run_data.examples(dvae)
        bundle = TextToImage(dvae, prior, contrastive, trainer.tokenizer, info, examples=examples)
        if parallel.is_main:
            bundle.save_pretrained(out / "bundle")
        return bundle


def _check(run_data: RunData, stages: Sequence[str]) -> ResolvedRecipe:
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
    if "prior" in trained and trained["prior"].freezing and not run_data.parallel.can_freeze:
        raise UserError(CANNOT_FREEZE)
    if "prior" in trained and trained["prior"].cache_mb and resolved.recipe.text.dropout:
        raise UserError("prior.cache_mb needs text.dropout 0: else captions have other tokens in each epoch")
    if "prior" in trained and not ("dvae" in trained or resolved.dvae_bundle or done):
        raise UserError(f"no dVAE in {out / 'dvae'}: train the stage 'dvae' first")
    return resolved


@contextmanager
def _check_skipped(out: Path, stages: Sequence[Stage], parallel: Parallel) -> Iterator[None]:
    """Raise `UserError` on the first process, after the block, if a stage has skipped most of its updates."""
    yield
    counts = {name: skipped_updates(out / name) for name in stages} if parallel.is_main else {}
    if parts := [f"{n:,} of {m:,} updates of the {STAGE_TITLES[name]}" for name, (n, m) in counts.items() if n > m / 2]:
        raise UserError(
            f"{' and '.join(parts)} {SKIPPED}: the run in {out} is saved but barely trained; lower the learning "
            "rate or lengthen the warm-up, and train in another folder"
        )
