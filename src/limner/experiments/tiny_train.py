"""Small in-memory trainings on scenes, for the findings about precision and stability.

Scenes have one or two objects, 24 x 24 pixels and a caption of at most `TEXT` tokens. By default, the learning rate
warms up for a quarter of the steps and follows a cosine, gradients are not clipped, and products are in fp32.

Shapes: T steps, N scenes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from limner.numerics.precision import Fp32
from limner.optim.schedules import Cosine
from limner.tasks.captions import describe
from limner.tasks.rendering import render
from limner.tasks.scenes import sample_scene
from limner.text.bpe import Tokenizer
from limner.training.config import TrainConfig
from limner.training.grad_scaler import scaling
from limner.training.hooks import Hook
from limner.training.parallel import Parallel
from limner.training.rms_monitor import rms
from limner.training.step import update
from limner.training.train_module import Objective
from limner.training.train_state import Diverged, TrainState

SIZE, SCENES, WORDS, TEXT = 24, 4_096, 400, 24

Change = Callable[[int, Tensor], Tensor]  # (step, first tensor of the batch) -> tensor


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        loss: [T], shorter if the run diverged.
        rms: RMS_t of the recorded tensors, [T] each; 1 where undefined.
        run: the final state, with the model.
    """

    loss: Float[np.ndarray, " T"]
    rms: dict[str, Float[np.ndarray, " T"]]
    run: TrainState


class RMSRecorder(Hook):
    """A hook that records RMS_t of the named tensors; 1 where RMS_t is undefined."""

    def __init__(self, names: Sequence[str]) -> None:
        self.values: dict[str, list[float]] = {name: [] for name in names}

    def before_step(self, run: TrainState) -> None:
        for series in self.values.values():
            series.append(1.0)

    def before_update(self, run: TrainState) -> None:
        rms_by_id = {id(p): value for p, value in rms(run.optimizers)} if self.values else {}
        for name, series in self.values.items():
            if (value := rms_by_id.get(id(run.model.get_parameter(name)))) is not None:
                series[-1] = value.item()


@cache
def scenes(count: int = SCENES, seed: int = 0) -> tuple[UInt8[Tensor, "N 3 H W"], Int64[Tensor, "N T"]]:
    """Return pictures and the tokens of their captions."""
    pictures, captions = [], []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        scene = sample_scene(rng, count=1 + i % 2)
        pictures.append(torch.from_numpy(render(scene, SIZE)).permute(2, 0, 1))
        captions.append(describe(scene, rng))
    return torch.stack(pictures), _tokenizer().encode(captions, TEXT)


@cache
def _tokenizer() -> Tokenizer:
    """Train a tokenizer on captions of scenes."""
    rngs = (np.random.default_rng([2, i]) for i in range(1_024))
    return Tokenizer.train([describe(sample_scene(rng, count=1 + i % 2), rng) for i, rng in enumerate(rngs)], WORDS)


def train(
    model: nn.Module,
    objective: Objective,
    samples: Mapping[str, Tensor],
    steps: int,
    *,
    batch: int = 64,
    seed: int = 0,
    change: Change | None = None,
    rms_of: Sequence[str] = (),
    hooks: Callable[[TrainState], Sequence[Hook]] = scaling,
    parallel: Parallel | None = None,
    **settings: Any,
) -> Trained:
    """Train on random batches.

    Args:
        samples: tensors by name, [N, ...] each; a batch has the same rows of each.
        change: maps the step and the first tensor of a batch to a new tensor.
        rms_of: names of parameters whose RMS_t is recorded.
        hooks: makes the training hooks; default `grad_scaler.scaling`.
        parallel: the strategy of several replicas; None for a single process.
        settings: further fields of `TrainConfig`.
    """
    config = TrainConfig(
        steps=steps, batch_size=batch, clip_norm=None, warmup_steps=steps // 4, schedule=Cosine(), precision=Fp32(),
        seed=seed, max_bad_steps=50,
    )  # fmt: skip
    run = TrainState(model, objective, replace(config, **settings), parallel=parallel)
    recorder, rng, losses = RMSRecorder(rms_of), np.random.default_rng(seed), []
    all_hooks, first = [*hooks(run), recorder], next(iter(samples))
    for step in range(steps):
        rows = rng.choice(len(samples[first]), batch, replace=False)
        batch_samples = {name: tensor[rows] for name, tensor in samples.items()}
        if change:
            batch_samples[first] = change(step, batch_samples[first])
        try:
            update(run, batch_samples, all_hooks)
        except Diverged:
            break
        losses.append(run.loss)
    for hook in all_hooks:
        hook.close()
    return Trained(np.array(losses), {name: np.array(values) for name, values in recorder.values.items()}, run)
