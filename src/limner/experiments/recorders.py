"""Hooks that record magnitudes and overflows in each step of a trial (Wortsman et al. 2023, Figures 2, 11 and 21)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from limner.training.hooks import Hook
from limner.training.train_state import TrainState


def mean_and_max(x: Tensor) -> list[float]:
    """Return the mean and the largest magnitude."""
    magnitudes = x.detach().float().abs()
    return torch.stack([magnitudes.mean(), magnitudes.amax()]).tolist()


class MagnitudeRecorder(Hook):
    """Records magnitudes in each step of the training of a CLIP model.

    Attributes:
        features: mean and maximum of the output of each image block, in each step.
        gradients: mean and maximum of the gradient of each tensor in `names`, in each step.
    """

    def __init__(self, run: TrainState, *names: str) -> None:
        model: Any = run.model
        self.parameters = {name: model.get_parameter(name) for name in names}
        self.features: list[list[list[float]]] = []
        self.gradients: dict[str, list[list[float]]] = {name: [] for name in names}
        self.handles = [
            block.register_forward_hook(lambda _, args, x: self.features[-1].append(mean_and_max(x)))
            for block in model.image_blocks
        ]

    def before_step(self, run: TrainState) -> None:
        self.features.append([])

    def after_backward(self, run: TrainState) -> None:
        for name, p in self.parameters.items():
            self.gradients[name].append([0.0, 0.0] if p.grad is None else mean_and_max(p.grad))

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


class OverflowRecorder(Hook):
    """Records log2 of a loss scaler's scale, and the names of tensors whose gradient has Inf or NaN, in each step.
    Precedes the scaler, which may remove these gradients."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.scales: list[float] = []
        self.names: list[list[str]] = []

    def after_backward(self, run: TrainState) -> None:
        grads = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
        finite = torch.stack([grad.isfinite().all() for grad in grads.values()]).tolist()
        self.names.append([name for name, is_finite in zip(grads, finite, strict=True) if not is_finite])
        self.scales.append(self.scaler.scale.log2().item())
