"""Small priors of scenes, over tokens of 4 x 4 patches."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from limner.experiments import tiny_train
from limner.experiments.tiny_train import SCENES, SIZE, TEXT, WORDS, Trained, scenes
from limner.models.patch_dvae import PatchDVAEConfig
from limner.models.transformer import Transformer, TransformerConfig
from limner.objectives.autoregressive import Autoregressive

CODES = 256
_HELD_OUT = 512  # scenes
MODEL = TransformerConfig(
    text_vocab=WORDS,
    image_vocab=CODES,
    text_len=TEXT,
    grid=(SIZE // 4, SIZE // 4),
    width=64,
    depth=6,
    heads=2,
    kernel=3,
)


@cache
def _tokens(count: int, seed: int) -> Int64[Tensor, "N S"]:
    dvae = PatchDVAEConfig(size=SIZE, vocab=CODES).build()
    dvae.fit_codebook(scenes()[0][:1_024], torch.Generator().manual_seed(0), samples=20_000)
    return dvae.tokenize(scenes(count, seed)[0])


def train(steps: int, *, model: TransformerConfig = MODEL, seed: int = 0, **settings: Any) -> Trained:
    """Train a prior. `settings` go to `tiny_train.train`."""
    samples = {"text": scenes()[1], "image": _tokens(SCENES, 0)}
    torch.manual_seed(seed)
    return tiny_train.train(model.build(), Autoregressive(), samples, steps, seed=seed, **settings)


@torch.no_grad()
def held_out_loss(model: Transformer) -> float:
    """Return the training loss on new scenes."""
    model.eval()
    batch = {"text": scenes(_HELD_OUT, seed=1)[1], "image": _tokens(_HELD_OUT, 1)}
    loss, _ = Autoregressive()(model, batch, 0, None)
    model.train()
    return loss.item()
