"""Small contrastive models of scenes, with patch dropout and a norm after the patch embedding as in the second paper
(Wortsman et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch

from limner.experiments import tiny_train
from limner.experiments.tiny_train import SCENES, SIZE, TEXT, WORDS, Trained, scenes
from limner.models.contrastive import CLIP, CLIPConfig
from limner.objectives.hard_negatives import HardNegativeLoss

MODEL = CLIPConfig(
    text_vocab=WORDS, text_len=TEXT, size=SIZE, patch=4, width=64, depth=3, heads=2, embedding=64, patch_dropout=0.5,
    patch_norm=True,
)  # fmt: skip
PATCHES = "patches.weight"
_HELD_OUT, _CANDIDATES = 1_024, 64  # scenes, and candidate captions per picture


def train(steps: int, *, model: CLIPConfig = MODEL, count: int = SCENES, seed: int = 0, **settings: Any) -> Trained:
    """Train a model on the first `count` scenes. `settings` go to `tiny_train.train`, whose first tensor is the
    pictures."""
    pictures, tokens = scenes(count)
    torch.manual_seed(seed)
    samples = {"pixels": pictures, "text": tokens}
    return tiny_train.train(model.build(), HardNegativeLoss(), samples, steps, seed=seed, **settings)


@torch.no_grad()
def accuracy(model: CLIP) -> float:
    """Return the share of held-out scenes whose true caption is the nearest among `_CANDIDATES`."""
    pictures, tokens = scenes(_HELD_OUT, seed=1)
    model.eval()
    right = 0
    for p, t in zip(pictures.split(_CANDIDATES), tokens.split(_CANDIDATES), strict=True):
        similarity = model.encode_image(p) @ model.encode_text(t).mT
        right += int((similarity.argmax(1) == torch.arange(len(p))).sum())
    model.train()
    return right / _HELD_OUT
