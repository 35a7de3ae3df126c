"""Estimates of the training time of a run on this machine, from a few timed steps of each stage.

Weights and batches are random, since speed does not depend on them. Estimates exclude data loading, evaluations and
checkpoints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from limner.models.patch_dvae import AnyDVAEConfig
from limner.recipes.recipe import (
    STAGE_TITLES,
    AnyStage,
    PretrainedDVAE,
    PriorStage,
    Recipe,
    resolve_contrastive_config,
    resolve_dvae_config,
    resolve_prior_config,
)
from limner.runs.parallel_stage import trained_together
from limner.training.checkpoint import completed, step_of
from limner.training.step import update
from limner.training.train_state import Run

COMPANY = 1.25  # slowdown of a step while the other stage trains in parallel
_ROOM = 1.2  # seconds that a timed batch may take
_FEW = 100  # steps: shorter stages are not timed
_WORK = 5e11  # FLOPs per sample, at most, of a timed stage: some seconds on a slow processor
_DAY = 86_400  # seconds

Batches = Callable[[int], dict[str, Tensor]]


def tell(recipe: Recipe, out: Path, stages: Sequence[str], smaller: str | None = None) -> None:
    """Print the estimated remaining time of the stages to stderr. Beyond a day, suggest the recipe `smaller` or fewer
    steps. Prints nothing if few steps remain, and raises no exception."""
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            lines = _lines(recipe, out, stages, smaller)
    except Exception as error:  # if the error affects training, training raises it
        lines = [f"how long training will take cannot be tried ({type(error).__name__})"]
    if lines:
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def _lines(recipe: Recipe, out: Path, stages: Sequence[str], smaller: str | None) -> list[str]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    beside = {"prior", "contrastive"} if trained_together(stages, device) else set()
    threads = torch.get_num_threads()
    said, took, untried = {}, dict.fromkeys(STAGE_TITLES, 0.0), False
    freed = 1.0  # time of a prior step after the contrastive model is done, relative to one in parallel
    for name, title in STAGE_TITLES.items():
        stage = getattr(recipe, name)
        if name not in stages or isinstance(stage, PretrainedDVAE):
            continue
        done = completed(out / name)
        steps = stage.training.steps - (step_of(done[-1]) if done else 0)
        if steps <= _FEW:
            continue
        said[name] = f"  {title}: {steps:,} steps"
        if _work(recipe, name) > _WORK:
            said[name] += " of a model that is too large to be tried"
            untried = True
            continue
        try:
            torch.set_num_threads(threads - threads // 2 if name in beside else threads)
            tried = trial(recipe, name)
            each = seconds_per_step(*tried, _ROOM, device)
        finally:
            torch.set_num_threads(threads)
        took[name] = each * steps * (COMPANY if name in beside else 1)
        if name in beside and name == "prior":
            freed = seconds_per_step(*tried, _ROOM, device) / (each * COMPANY)
        if took[name] > _DAY:
            what, total = f"the {title} alone", took[name]
            break
    else:
        if beside:
            took["prior"] -= max(0, took["prior"] - took["contrastive"]) * (1 - freed)
        side_by_side = max if beside else sum
        what, total = "all of it", took["dvae"] + side_by_side((took["prior"], took["contrastive"]))
    lines = [
        said[name] + (f", about {_duration(took[name])}{' beside the other' * (name in beside)}" if took[name] else "")
        for name in said
    ]
    if not lines:
        return []
    known = f"{'more than' if untried else 'about'} {_duration(total)}" if total else "longer than can be tried"
    end = f"{what} takes {known}"
    if untried or total > _DAY:
        end += f": {f'--recipe {smaller} is a smaller one' if smaller else 'lower the steps'}"
    return ["a few steps of each stage were tried, on this machine as busy as it is now:", *lines, end]


def _duration(seconds: float) -> str:
    """Format a duration: "40 minutes", "3 hours"."""
    minutes = max(1, round(seconds / 60))
    count, unit = (minutes, "minute") if minutes < 100 else (round(minutes / 60), "hour")
    return f"{count:,} {unit}{'s' * (count > 1)}"


def _model(recipe: Recipe, name: str, dvae: AnyDVAEConfig) -> nn.Module:
    """Build the model of a stage with initial weights."""
    if name == "dvae":
        return dvae.build()
    fitted = resolve_prior_config if name == "prior" else resolve_contrastive_config
    return fitted(getattr(recipe, name), recipe.text, recipe.text.vocab, dvae).build()


def _work(recipe: Recipe, name: str) -> float:
    """Estimate the FLOPs of a training step per sample: 6 per parameter and position. Each group of a dVAE is counted
    like the innermost one, which has most of the parameters and works at the grid's resolution."""
    dvae = resolve_dvae_config(recipe)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in _model(recipe, name, dvae).parameters())
    places = prod(dvae.grid)
    if name == "contrastive":
        places = (dvae.size // recipe.contrastive.model.patch) ** 2
    return 6 * parameters * (places * dvae.groups if name == "dvae" else places + recipe.text.length)


def trial(recipe: Recipe, name: str) -> tuple[nn.Module, AnyStage, Batches]:
    """Return the model of a stage, the stage, and a function that generates random batches of a given size."""
    stage, text, dvae = getattr(recipe, name), recipe.text, resolve_dvae_config(recipe)
    encoder = dvae.build() if isinstance(stage, PriorStage) and stage.augment else None

    def batches(n: int) -> dict[str, Tensor]:
        pixels = torch.randint(0, 256, (n, 3, dvae.size, dvae.size), dtype=torch.uint8)
        if name == "dvae":
            return {"pixels": pixels}
        batch = {"text": torch.randint(0, text.vocab, (n, text.length))}
        if isinstance(stage, PriorStage):  # with augmentation, each step encodes its pictures
            image = encoder.tokens(pixels) if encoder else torch.randint(0, dvae.vocab, (n, prod(dvae.grid)))
            return {**batch, "image": image}
        if stage.distractors:
            batch["distractors"] = torch.randint(0, text.vocab, (n, stage.distractors, text.length))
        return {**batch, "pixels": pixels}

    return _model(recipe, name, dvae), stage, batches


def seconds_per_step(
    model: nn.Module,
    stage: AnyStage,
    batches: Batches,
    room: float,
    device: torch.device | str = "cpu",
) -> float:
    """Estimate the seconds of a training step. Times one sample, and as many (at least two) as take about `room`
    seconds; extrapolates linearly to the whole batch."""
    run, size = Run(model, stage.objective, stage.training, device), stage.training.batch_size

    def took(samples: int) -> float:
        begun = time.monotonic()
        update(run, batches(samples))
        return time.monotonic() - begun

    def shortest(samples: int) -> float:
        """Return the shortest of three timings, since other processes only add time; of one if that is slow."""
        once = took(samples)
        return once if once > 1.5 * room else min(once, took(samples), took(samples))

    took(1)  # warms up
    one = shortest(1)
    if size == 1:
        return one
    some = max(2, min(size, int(room / one)))
    found = shortest(some)
    return found + (size - some) * max(0.0, found - one) / (some - 1)
