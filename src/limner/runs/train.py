"""Run a recipe: tokenizer, dVAE, prior, contrastive model, bundle.

    RUN/recipe.json   RUN/tokenizer.json   RUN/dvae/   RUN/tokens/   RUN/prior/   RUN/contrastive/   RUN/bundle/

A finished stage is loaded and an interrupted stage resumes, so repeating the command after Ctrl-C or a crash
continues the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from limner.atomic_io import locked
from limner.config import save_json, to_dict
from limner.errors import UserError
from limner.pipeline import TextToImage
from limner.recipes.recipe import STAGE_TITLES, Recipe, resolve_dvae_config
from limner.runs.parallel_stage import contrastive_beside, trained_together
from limner.runs.preflight import check
from limner.runs.run_data import Material
from limner.runs.stages import STAGES, Stage, Stages
from limner.training.checkpoint import skipped_updates
from limner.training.parallel import Parallel, Single
from limner.training.train_state import SKIPPED


def train_all(
    recipe: Recipe,
    data: str | Path,
    out: str | Path,
    stages: Sequence[Stage] | None = None,
    before: Callable[[Sequence[Stage]], object] | None = None,
    parallel: Parallel | None = None,
) -> TextToImage | None:
    """Train the stages (default: all) and write `out/bundle`.

    Returns the bundle on the first process once all three models exist, else None. `before` is called with the stages
    after the checks. Raises `UserError` if the stages cannot be trained, or after writing if most updates of a stage
    were skipped. On a CPU with several threads the prior and the contrastive model train in parallel. With several
    processes (`parallel`) all train every stage together, and the first writes the files.
    """
    parallel, wanted, out = parallel or Single(), stages or STAGES, Path(out)
    material = Material.of(recipe, data, out, parallel)
    run = Stages(material)
    with locked(out) if parallel.is_main else nullcontext(-1) as lock, _mostly_updated(out, wanted, parallel):
        check(material, wanted)
        with parallel.first():
            if parallel.is_main:
                save_json(recipe, out / "recipe.json")
            credited = material.credited()
            if before and parallel.is_main:
                before(wanted)
        tokenizer = material.tokenizer() if {"prior", "contrastive"} & set(wanted) else None
        if tokenizer and set(wanted) == {"contrastive"} and not run.has_dvae():  # needs only the dVAE's config
            run.contrastive(tokenizer, resolve_dvae_config(recipe))
            return None
        dvae = run.dvae(train="dvae" in wanted)
        if tokenizer is None:
            return None
        alone = parallel.world == 1 and not torch.are_deterministic_algorithms_enabled()
        both = alone and trained_together(wanted, run.device)
        with contrastive_beside(recipe, data, out, lock) if both else nullcontext() as watch:
            prior = run.prior(tokenizer, dvae, "prior" in wanted, [watch] if watch else [])
        contrastive = run.contrastive(tokenizer, dvae.config, train="contrastive" in wanted and not both)
        if prior is None or contrastive is None:
            return None
        info = {
            "data": Path(data).name,
            "samples": len(material.train),
            "recipe": to_dict(recipe),
            "temperature": recipe.prior.temperature,
            "guidance": recipe.prior.guidance,
            "likelihood": recipe.contrastive.prior_score_weight,
        } | ({"attribution": credited} if credited else {})
        bundle = TextToImage(dvae, prior, contrastive, tokenizer, info)
        if parallel.is_main:
            bundle.save_pretrained(out / "bundle")
        return bundle


@contextmanager
def _mostly_updated(out: Path, stages: Sequence[Stage], parallel: Parallel) -> Iterator[None]:
    """Raise `UserError` on the first process, after the block, if a stage has skipped most of its updates."""
    yield
    counts = {name: skipped_updates(out / name) for name in stages} if parallel.is_main else {}
    if bad := [f"{n:,} of {m:,} updates of the {STAGE_TITLES[name]}" for name, (n, m) in counts.items() if n > m / 2]:
        raise UserError(
            f"{' and '.join(bad)} {SKIPPED}: the run in {out} is saved but has hardly learned; lower the learning "
            "rate or lengthen the warm-up, and train in another folder"
        )
