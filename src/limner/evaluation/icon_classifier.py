"""Classifier of the subject and the style of icons, used to check drawings.

A small residual network (He et al. 2016) with two heads, trained on all real pictures of a data set, held-out ones
included. It is a measuring instrument: its accuracy on the real pictures is an upper bound of the accuracy that an
evaluation can report, not a measure of generalization. A dVAE changes single pixels of every drawing, so training
pictures are augmented with noise; color pictures are also shifted, rotated, scaled, blurred and recolored.

A classifier is a run of the training loop in a folder named by a hash of its pictures, labels and settings. The same
call trains it, resumes its training, or loads it.

Shapes: B pictures of H x W pixels, K subjects, L styles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limner.config import to_dict
from limner.data.stream import Stream
from limner.optim.optimizers import AdamWConfig
from limner.optim.schedules import Cosine
from limner.progress import Progress
from limner.training.checkpoint import latest, load_weights, step_of
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.train_module import Batch
from limner.training.train_state import TrainState
from limner.validation import Range, Validated

_BATCH_SIZE = 256  # at inference
_POOLED_SIDE = 4  # keeps coarse positions: some subjects differ only in where their parts are
_GROUPS = 8  # of GroupNorm


@dataclass(frozen=True, kw_only=True)
class IconClassifierConfig(Validated):
    """Network size and training settings.

    Args:
        width: channels at half the resolution; each further halving doubles them.
        steps: training steps.
        batch_size, lr: of AdamW with a cosine schedule.
        varied: move, scale, blur and recolor training pictures. Not for styles that differ in just these.
    """

    width: Annotated[int, Range(_GROUPS, 1_024)] = 24
    steps: Annotated[int, Range(1, 10**7)] = 6_000
    batch_size: Annotated[int, Range(1, 4_096)] = 64
    lr: Annotated[float, Range(gt=0)] = 2e-3
    varied: bool = True


class IconNet(nn.Module):
    """Network from pictures [B, 3, H, W] in 0 .. 1 to logits of subjects [B, K] and of styles [B, L]."""

    def __init__(self, subjects: int, styles: int, width: int) -> None:
        super().__init__()
        widths = [width * factor for factor in (1, 2, 4, 8)]
        self.stem = nn.Conv2d(3, width, 5, 2, 2)
        self.stages = nn.ModuleList(_Stage(a, b) for a, b in pairwise(widths))
        self.norm = nn.GroupNorm(_GROUPS, widths[-1])
        self.mix = nn.Linear(_POOLED_SIDE**2 * widths[-1], 2 * widths[-1])
        self.subject, self.style = nn.Linear(2 * widths[-1], subjects), nn.Linear(2 * widths[-1], styles)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem((2 * x - 1).contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            x = stage(x)
        x = F.adaptive_avg_pool2d(F.relu(self.norm(x)), _POOLED_SIDE)
        x = F.relu(self.mix(x.flatten(1)))
        return self.subject(x), self.style(x)


class _Stage(nn.Module):
    """A strided convolution and a residual one: [B, a, H, W] -> [B, b, H/2, W/2]."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(_GROUPS, a), nn.GroupNorm(_GROUPS, b)])
        self.convolutions = nn.ModuleList([nn.Conv2d(a, b, 3, 2, 1), nn.Conv2d(b, b, 3, 1, 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions[0](F.relu(self.norms[0](x)))
        return x + self.convolutions[1](F.relu(self.norms[1](x)))


def augment(pixels: Tensor, generator: torch.Generator, varied: bool = True) -> Tensor:
    """Augment uint8 [B, 3, H, W] -> [B, 3, H, W] in 0 .. 1, independently for each picture.

    Noise on pixels and on 4 x 4 squares, which resembles dVAE errors. If `varied`, before it: rotation by up to 11
    degrees, sampling scale 0.8 to 1.1, shift by up to a twelfth of the side, blur of half the pictures to at most half
    the resolution, contrast 0.85 to 1.15 and brightness by up to 0.05 per color channel. No flips: a hand that points
    left and one that points right are two subjects.
    """
    b, _, h, w = pixels.shape

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(b, *shape, generator=generator, device=pixels.device) * (high - low) + low

    def noise(height: int, width: int) -> Tensor:
        values = torch.randn(b, 3, height, width, generator=generator, device=pixels.device)
        return F.interpolate(values * uniform(0, 0.05, 1, 1, 1), (h, w))

    if not varied:
        return (pixels.float() / 255 + noise(h, w) + noise(h // 4, w // 4)).clamp(0, 1)
    angle, size, x, y = uniform(-0.2, 0.2), uniform(0.8, 1.1), uniform(-1 / 6, 1 / 6), uniform(-1 / 6, 1 / 6)
    cos, sin = angle.cos() / size, angle.sin() / size
    theta = torch.stack([torch.stack([cos, -sin, x], 1), torch.stack([sin, cos, y], 1)], 1)  # output -> input
    grid = F.affine_grid(theta, [b, 3, h, w], align_corners=False)
    pictures = F.grid_sample(pixels.float() / 255, grid, padding_mode="border", align_corners=False)
    blurred = F.interpolate(F.avg_pool2d(pictures, 2), (h, w), mode="bilinear")
    pictures = pictures.lerp(blurred, uniform(-1, 1, 1, 1, 1).clamp_min(0))
    pictures = pictures * uniform(0.85, 1.15, 3, 1, 1) + uniform(-0.05, 0.05, 3, 1, 1)
    return (pictures + noise(h, w) + noise(h // 4, w // 4)).clamp(0, 1)


def _subject_and_style(
    varied: bool, model: IconNet, batch: Batch, step: int, generator: torch.Generator
) -> tuple[Tensor, dict[str, Tensor]]:
    """Objective on augmented pictures: cross-entropy of the subject plus cross-entropy of the style."""
    loss, accuracy = torch.zeros(()), {}
    for name, logits in zip(("subject", "style"), model(augment(batch["pixels"], generator, varied)), strict=True):
        loss = loss + F.cross_entropy(logits.float(), batch[name])
        accuracy[name] = (logits.argmax(1) == batch[name]).float().mean()
    return loss, accuracy


class LabeledIcons:
    """Training data of a classifier: pictures uint8 [M, 3, H, W], the subject and the style of each."""

    def __init__(self, pictures: Tensor, subjects: Sequence[str], styles: Sequence[str]) -> None:
        self.pictures, self.subjects, self.styles = pictures, sorted(set(subjects)), sorted(set(styles))
        self._subject = torch.tensor([self.subjects.index(name) for name in subjects])
        self._style = torch.tensor([self.styles.index(name) for name in styles])

    def __len__(self) -> int:
        return len(self.pictures)

    def batch(self, indices: np.ndarray, seeds: np.ndarray) -> dict[str, Tensor]:
        return {"pixels": self.pictures[indices], "subject": self._subject[indices], "style": self._style[indices]}

    def digest(self, config: IconClassifierConfig) -> str:
        """Return the SHA-256 of the pictures, the labels and the settings."""
        sha = hashlib.sha256(
            json.dumps([to_dict(config), list(self.pictures.shape), self.subjects, self.styles]).encode()
        )
        for array in (self.pictures, self._subject, self._style):
            sha.update(array.contiguous().numpy().data)
        return sha.hexdigest()


class IconClassifier:
    """A trained network with the names of its classes."""

    def __init__(self, net: IconNet, subjects: Sequence[str], styles: Sequence[str]) -> None:
        self.net, self.subjects, self.styles = net.eval(), list(subjects), list(styles)

    @torch.inference_mode()
    def classify(self, pictures: Tensor) -> tuple[list[str], list[str]]:
        """Return the subjects and the styles of uint8 [B, 3, H, W]."""
        subjects, styles = [], []
        for part in pictures.split(_BATCH_SIZE):
            subject, style = self.net(part.float() / 255)
            subjects += [self.subjects[i] for i in subject.argmax(1).tolist()]
            styles += [self.styles[i] for i in style.argmax(1).tolist()]
        return subjects, styles


def train_classifier(
    data: LabeledIcons,
    folder: str | Path,
    config: IconClassifierConfig = IconClassifierConfig(),
    bar: Progress | None = None,
) -> IconClassifier:
    """Load the classifier of these pictures from `folder`, or train it there. Raises as `training.loop.train`."""
    out = Path(folder) / data.digest(config)[:16]
    torch.manual_seed(0)
    net = IconNet(len(data.subjects), len(data.styles), config.width)
    checkpoint = latest(out)
    if checkpoint and step_of(checkpoint) == config.steps:
        load_weights(net, checkpoint)
    else:
        training = TrainConfig(
            steps=config.steps, batch_size=config.batch_size, optimizer=AdamWConfig(lr=config.lr), clip_norm=1.0,
            warmup_steps=config.steps // 20, schedule=Cosine(), keep=1,
        )  # fmt: skip
        record = {"classifier": {**to_dict(config), "pictures": len(data)}}
        run = TrainState(net, partial(_subject_and_style, config.varied), training)
        train(run, Stream(data, config.batch_size), out, record=record, bar=bar)
    return IconClassifier(net, data.subjects, data.styles)
