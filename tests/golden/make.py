"""Record the losses of the first 20 updates of each objective: curves.json.

`python tests/golden/make.py` records all curves, with names as arguments only the named ones.

Each curve comes from the real loop, on a CPU, from a seed: priors in fp32, other models in fp64. A change that must
not affect learning (another package, another kernel, another order of the same sums) keeps these curves. A change that
must is committed together with the new curves, and its message names them.

Three curves train the unchanged recipe `paper`, so that a change of its numbers shows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from limner.data.stream import Stream
from limner.models.contrastive import CLIPConfig
from limner.models.dvae import DVAEConfig
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.contrastive import CLIPLoss
from limner.objectives.elbo import RelaxedELB
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.objectives.reconstruction_loss import ReconstructionLoss
from limner.optim.optimizers import AdamWConfig
from limner.optim.schedules import Anneal, Cosine, Plateau
from limner.recipes.presets import paper
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.train_module import Objective
from limner.training.train_state import TrainState

FILE = Path(__file__).with_name("curves.json")
KEPT = ("loss", "grad_norm", "eval/loss")  # of each line of metrics.jsonl
PAD, TEXT, VOCAB, SIDE = -1, 8, 32, 24


class Squares:
    """Pictures of one square on a plain ground, a caption of its color and place, and tokens that follow from both.

    `grid` tokens per picture. Captions differ in length; each picture has two wrong captions; one may be empty.
    """

    def __init__(self, *names: str, grid: tuple[int, int] = (6, 6)) -> None:
        self.names, self.grid = names, grid

    def __len__(self) -> int:
        return 50

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        samples = [self.sample(int(i), np.random.default_rng(s)) for i, s in zip(indices, seeds, strict=True)]
        return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in self.names}

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        ground, x, y = index * 37 % 256, index % 4 * 4, index % 3 * 5
        pixels = np.full((3, SIDE, SIDE), ground, np.uint8)
        pixels[:, y : y + 8, x : x + 8] = random.integers(0, 256, (3, 1, 1))
        h, w = self.grid
        image = (np.arange(h * w).reshape(h, w) * (1 + index % 3) + index).ravel() % VOCAB
        distractors = np.stack([caption(index + 1), caption(index + 7) if index % 4 else np.full(TEXT, PAD)])
        return {"pixels": pixels, "text": caption(index), "image": image, "distractors": distractors}


def caption(index: int) -> np.ndarray:
    """int64 [T], between 2 and T tokens of it."""
    words = (index * np.arange(1, TEXT + 1)) % VOCAB
    return np.where(np.arange(TEXT) < 2 + index % (TEXT - 1), words, PAD)


@contextmanager
def double() -> Iterator[None]:
    """Compute in fp64 where models ask for floats, and in the initial weights, whose last bits differ in fp32.

    dVAEs pool maxima and choose codes. In fp32 rounding turns such a choice, and from there on curves differ by 1%.
    """
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


OURS = TrainConfig(steps=20, optimizer=AdamWConfig(lr=3e-3, eps=1e-6), ema_decay=0.9)


def curve(
    model: nn.Module, objective: Objective, data: Squares, config: TrainConfig = OURS, **settings: Any
) -> dict[str, list[float]]:
    """20 updates; "eval/loss" is that of the averaged weights on other pictures, after 10 and after 20."""
    held_out = data.batch(np.arange(100, 108), np.arange(8))

    def evaluate(averaged: nn.Module, step: int) -> dict[str, float]:
        loss, _ = objective(averaged, held_out, step, torch.Generator().manual_seed(1))
        return {"loss": loss.item()}

    config = replace(config, steps=20, batch_size=8, log_every=1, eval_every=10, precision=Fp32(), **settings)
    with tempfile.TemporaryDirectory() as out:
        train(TrainState(model, objective, config), Stream(data, 8, seed=3), out, evaluate=evaluate)
        rows = read_metrics(Path(out) / "metrics.jsonl")
    return {name: [row[name] for row in rows if name in row] for name in KEPT}


def times(config: Any, **factors: float) -> Any:
    """The configuration with its numbers of these names, and those of what it holds, times the factors."""
    changed = {}
    for name, value in ((field.name, getattr(config, field.name)) for field in fields(config)):
        if name in factors and value is not None:
            changed[name] = type(value)(value * factors[name])
        elif is_dataclass(value):
            changed[name] = times(value, **factors)
    return replace(config, **changed)


@double()
def paper_dvae() -> dict[str, list[float]]:
    """The recipe's numbers, but for the model's sizes. Schedules are compressed into 20 updates; learning rate, decay
    and limits are scaled until few updates of a small model show a tenth more or less of them."""
    stage = paper().dvae
    assert isinstance(stage.objective, RelaxedELB) and isinstance(stage.model, DVAEConfig)
    beta, tau = times(stage.objective.beta, steps=1 / 500), times(stage.objective.tau, steps=1 / 7_500)
    model = replace(stage.model, size=SIDE, width=8, vocab=VOCAB, code_width=16)
    config = times(stage.training, lr=30, weight_decay=3_000, clip_norm=1 / 40, steps=1 / 60_000)
    return curve(model.build(), RelaxedELB(beta=beta, tau=tau), Squares("pixels"), config)


def paper_prior() -> dict[str, list[float]]:
    """Return the curve of the paper's prior. No loss reaches the threshold, so the learning rate is halved as often as
    allowed. Weights and gradients are in fp32, without scales, so that curves do not depend on rounding."""
    stage, grid = paper().prior, (17, 16)
    model = replace(
        stage.model, text_vocab=VOCAB, image_vocab=VOCAB, text_len=TEXT, grid=grid, width=32, depth=6, heads=2
    )
    config = times(
        stage.training, lr=10, weight_decay=10, max_exp_avg_sq=1e-7, clip_norm=1 / 40, warmup_steps=1 / 1_000,
        ema_every=1 / 5, window=1 / 500, threshold=900,
    )  # fmt: skip
    data = Squares("text", "image", grid=grid)
    return curve(model.build(), stage.objective, data, config, ema_on_cpu=False, scaling="none")


@double()
def paper_contrastive() -> dict[str, list[float]]:
    """Return the curve of the paper's CLIP."""
    stage = paper().contrastive
    model = replace(
        stage.model, text_vocab=VOCAB, text_len=TEXT, size=SIDE, patch=8, width=32, depth=2, heads=2, embedding=16
    )
    config = times(stage.training, lr=4, eps=1_000, weight_decay=10, clip_norm=1 / 40, warmup_steps=1 / 500)
    return curve(model.build(), CLIPLoss(), Squares("text", "pixels"), config)


def dvae() -> nn.Module:
    """The paper's shape: pooling after every group but the last, all blocks look around."""
    return DVAEConfig(size=SIDE, width=16, groups=3, blocks=2, vocab=VOCAB, code_width=16).build()


@double()
def relaxed_elb() -> dict[str, list[float]]:
    """Eq. 1 with its schedules, compressed into 20 steps; no clipping and a cosine, as in App. A.2."""
    objective = RelaxedELB(beta=Anneal(start=0.0, end=6.6, steps=10), tau=Anneal(start=1.0, end=1 / 16, steps=20))
    return curve(dvae(), objective, Squares("pixels"), clip_norm=None, schedule=Cosine(end=1 / 80))


@double()
def balanced_elb() -> dict[str, list[float]]:
    """Patches encoded alone; from step 14 on the decoder learns from argmax codes."""
    model = DVAEConfig(
        size=SIDE, width=16, groups=3, blocks=1, vocab=VOCAB, code_width=16, gain=0.5, init_gain=2**0.5, code_gain=3.0,
        context_groups=0,
    ).build()  # fmt: skip
    objective = BalancedELB(tau=Anneal(start=1.0, end=0.1, steps=10), freeze_encoder_from=14)
    return curve(model, objective, Squares("pixels"), clip_norm=1.0, warmup_steps=5)


@double()
def pixel_error() -> dict[str, list[float]]:
    """The decoder of a dVAE of patches, with blocks at both resolutions; from step 14 on of absolute error. Its codes
    are random: those that k-means finds in flat pictures may be equal, and rounding would choose among them."""
    model = PatchDVAEConfig(size=SIDE, width=16, blocks=2, pixel_blocks=1, vocab=VOCAB).build()
    model.codes.uniform_(0.1, 0.9)
    return curve(model, ReconstructionLoss(l1_from=14), Squares("pixels"), clip_norm=1.0)


def prior(grid: tuple[int, int], **settings: object) -> dict[str, list[float]]:
    model = TransformerConfig(
        text_vocab=VOCAB, image_vocab=VOCAB, text_len=TEXT, grid=grid, width=32, depth=6, heads=2, kernel=5
    ).build()
    return curve(model, Autoregressive(), Squares("text", "image", grid=grid), **settings)


def prior_sparse() -> dict[str, list[float]]:
    """Row, column, row, row, row, conv on 17 x 16 tokens: more than a mask is used for. As in App. B.2."""
    return prior(
        (17, 16), accumulate=2, clip_norm=4.0, warmup_steps=5, schedule=Plateau(window=2), ema_every=5,
        ema_warmup=False, checkpoint_activations=True,
    )  # fmt: skip


def prior_masked() -> dict[str, list[float]]:
    """The same layers on 6 x 6 tokens: a mask of all positions."""
    return prior((6, 6), ema_decay=None)


@double()
def contrastive() -> dict[str, list[float]]:
    """The bundled models' form, with two spoiled copies of each picture and two wrong captions."""
    model = CLIPConfig(
        text_vocab=VOCAB, text_len=TEXT, size=SIDE, patch=8, width=32, depth=2, heads=2, embedding=16, ln_pre=False,
        sinusoids=True,
    ).build()  # fmt: skip
    data = Squares("text", "pixels", "distractors")
    return curve(model, HardNegativeLoss(cut_paste_negatives=2), data, clip_norm=1.0, schedule=Cosine(end=0.02))


CURVES: tuple[Callable[[], dict[str, list[float]]], ...] = (
    paper_dvae, paper_prior, paper_contrastive, relaxed_elb, balanced_elb, pixel_error, prior_sparse, prior_masked,
    contrastive,
)  # fmt: skip


def measured(make: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the curve from a fixed seed of initial weights, independent of earlier random numbers."""
    torch.manual_seed(0)
    return make()


if __name__ == "__main__":
    makers = {make.__name__: make for make in CURVES}
    kept = json.loads(FILE.read_text(encoding="utf-8")) | {
        name: measured(makers[name]) for name in sys.argv[1:] or makers
    }
    FILE.write_text(json.dumps({name: kept[name] for name in makers}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE}", file=sys.stderr)
