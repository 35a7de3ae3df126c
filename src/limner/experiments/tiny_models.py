"""Small models of scenes, trained in memory: priors over tokens of 4 x 4 patches, and contrastive models.

Scenes have one or two objects, 24 x 24 pixels and a caption of at most `TEXT_LEN` tokens. The contrastive model has
patch dropout, as in Wortsman et al. 2023. By default, the learning rate warms up for a quarter of the steps and follows
a cosine, gradients are not clipped, and products are in fp32.

Shapes: N scenes, T text positions, S image positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from limner.models.contrastive import CLIPConfig
from limner.models.patch_dvae import PatchDVAE, PatchDVAEConfig
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.hard_negatives import HardNegativeLoss
from limner.optim.optimizers import AdamWConfig
from limner.optim.schedules import Cosine
from limner.tasks.captions import describe
from limner.tasks.rendering import render
from limner.tasks.scenes import Scene, sample_scene
from limner.text.bpe import Tokenizer
from limner.training.config import TrainConfig
from limner.training.grad_scaler import scaling
from limner.training.hooks import Hook
from limner.training.parallel import Parallel
from limner.training.step import update
from limner.training.train_module import Objective
from limner.training.train_state import Diverged, TrainState

SIZE, NUM_SCENES, TEXT_VOCAB, TEXT_LEN, CODES = 24, 4_096, 400, 24, 256
PRIOR = TransformerConfig(
    text_vocab=TEXT_VOCAB, image_vocab=CODES, text_len=TEXT_LEN, grid=(SIZE // 4, SIZE // 4), width=64, depth=6,
    heads=2, kernel=3,
)  # fmt: skip
CLIP = CLIPConfig(
    text_vocab=TEXT_VOCAB, text_len=TEXT_LEN, size=SIZE, patch=4, width=64, depth=3, heads=2, embedding=64,
    patch_dropout=0.5,
)  # fmt: skip
CANDIDATES = 64  # captions per picture for `accuracy`

Trained = tuple[TrainState, list[float]]  # final state, and the loss of each step until the run ended or diverged


@cache
def captioned_scenes(count: int, seed: int) -> list[tuple[Scene, str]]:
    """Return scenes, alternately of one and two objects, and their captions."""
    pairs = []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        scene = sample_scene(rng, count=1 + i % 2)
        pairs.append((scene, describe(scene, rng)))
    return pairs


@cache
def scenes(count: int = NUM_SCENES, seed: int = 0) -> tuple[UInt8[Tensor, "N 3 H W"], Int64[Tensor, "N T"]]:
    """Return pictures and the tokens of their captions."""
    drawn, captions = zip(*captioned_scenes(count, seed), strict=True)
    pictures = [torch.from_numpy(render(scene, SIZE)).permute(2, 0, 1) for scene in drawn]
    return torch.stack(pictures), tokenizer().encode(captions, TEXT_LEN)


@cache
def tokenizer() -> Tokenizer:
    """Train a tokenizer on captions of scenes."""
    rngs = (np.random.default_rng([2, i]) for i in range(1_024))
    captions = [describe(sample_scene(rng, count=1 + i % 2), rng) for i, rng in enumerate(rngs)]
    return Tokenizer.train(captions, TEXT_VOCAB)


@cache
def patch_dvae() -> PatchDVAE:
    """Return a dVAE whose codes are clusters of the patches of scenes."""
    dvae = PatchDVAEConfig(size=SIZE, vocab=CODES).build()
    dvae.fit_codebook(scenes()[0][:1_024], torch.Generator().manual_seed(0), samples=20_000)
    return dvae


@cache
def _image_tokens(count: int, seed: int) -> Int64[Tensor, "N S"]:
    return patch_dvae().tokenize(scenes(count, seed)[0])


def train_prior(*, model: TransformerConfig, seed: int, **settings: Any) -> Trained:
    """Train a prior on all scenes. `settings` go to `train_in_memory`."""
    samples = {"text": scenes()[1], "image": _image_tokens(NUM_SCENES, 0)}
    torch.manual_seed(seed)
    return train_in_memory(model.build(), Autoregressive(), samples, seed=seed, **settings)


def train_clip(
    *, model: CLIPConfig, seed: int, count: int = NUM_SCENES, device: str = "cpu", **settings: Any
) -> Trained:
    """Train a contrastive model on the first `count` scenes. `settings` go to `train_in_memory`."""
    pictures, tokens = scenes(count)
    samples = {"pixels": pictures, "text": tokens}
    torch.manual_seed(seed)
    return train_in_memory(model.build().to(device), HardNegativeLoss(), samples, seed=seed, **settings)


def train_in_memory(
    model: nn.Module, objective: Objective, samples: Mapping[str, Tensor], *, steps: int, batch: int, seed: int,
    lr: float = 2e-3, hooks: Callable[[TrainState], Sequence[Hook]] = scaling, parallel: Parallel | None = None,
    **settings: Any,
) -> Trained:  # fmt: skip
    """Train on random batches.

    Args:
        samples: tensors by name, [N, ...] each; a batch has the same rows of each.
        lr: learning rate of AdamW, unless `settings` has another optimizer.
        hooks: makes the training hooks.
        parallel: the strategy of several replicas; None for a single process.
        settings: further fields of `TrainConfig`.
    """
    config = TrainConfig(
        steps=steps, batch_size=batch, optimizer=AdamWConfig(lr=lr, betas=(0.9, 0.98)), clip_norm=None,
        warmup_steps=steps // 4, schedule=Cosine(), precision=Fp32(), seed=seed, max_bad_steps=50,
    )  # fmt: skip
    run = TrainState(model, objective, replace(config, **settings), next(model.parameters()).device, parallel)
    rng, losses, run_hooks = np.random.default_rng(seed), [], hooks(run)
    count = len(next(iter(samples.values())))
    for _ in range(steps):
        rows = rng.choice(count, batch, replace=False)
        try:
            update(run, {name: tensor[rows] for name, tensor in samples.items()}, run_hooks)
        except Diverged:
            break
        losses.append(run.loss)
    for hook in run_hooks:
        hook.close()
    return run, losses


def resized_clip(width: int, depth: int) -> CLIPConfig:
    """Return `CLIP` with two towers of another size."""
    return replace(CLIP, width=width, depth=depth, heads=max(2, width // 64), embedding=width)


def held_out(count: int) -> dict[str, Int64[Tensor, "N n"]]:
    """Return the tokens of new scenes and of their captions, a batch of a prior."""
    return {"text": scenes(count, seed=1)[1], "image": _image_tokens(count, 1)}


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Return a prior's training loss on 512 new scenes."""
    model.eval()
    loss, _ = Autoregressive()(model, held_out(512), 0, None)  # pyright: ignore[reportArgumentType]
    model.train()
    return loss.item()


@torch.no_grad()
def accuracy(model: Any) -> float:
    """Return the share of 1,024 new scenes whose true caption a CLIP ranks first among `CANDIDATES`."""
    pictures, tokens = (x.to(model.log_scale.device) for x in scenes(1_024, seed=1))
    model.eval()
    right = 0
    for p, t in zip(pictures.split(CANDIDATES), tokens.split(CANDIDATES), strict=True):
        similarity = model.encode_image(p) @ model.encode_text(t).mT
        right += int((similarity.argmax(1).cpu() == torch.arange(len(p))).sum())
    model.train()
    return right / len(pictures)
