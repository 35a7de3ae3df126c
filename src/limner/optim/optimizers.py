"""Optimizer configs. To add an optimizer, add a config class here and to the union `OptimizerConfig`.

`build` returns a list of torch optimizers that together hold each trainable parameter once. Every group keeps its base
learning rate under `initial_lr`, as torch's schedulers do. A schedule multiplies the base learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from limner.numerics.formats import HALF_FORMATS
from limner.optim import adamw, lion, muon, stable_adamw
from limner.optim.param_groups import DecayScope, block_matrices, parameter_groups
from limner.validation import Range, Validated

__all__ = [
    "AdamW16Config", "AdamWConfig", "Beta2WarmupAdamWConfig", "LionConfig", "MuonConfig", "OptimizerConfig",
    "StableAdamWConfig",
]  # fmt: skip


class _Settings(Validated):
    """Settings that several optimizers share.

    Args:
        lr: base learning rate, which the schedule multiplies.
        betas: decay per step of the running means of gradients and of their squares.
        eps: term added to the root of the running mean of squares.
        weight_decay: fraction of a weight subtracted per step, times the learning rate.
        decay_scope: parameters that decay: matrices except embeddings, or all.

    `needs_blocks`: the optimizer treats the matrices of a model's blocks specially, and requires some.
    `gathers_matrices`: an update needs the full matrix, so shards are gathered.
    """

    needs_blocks: ClassVar[bool] = False
    gathers_matrices: ClassVar[bool] = False

    def block_matrices(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the matrices of a model's blocks. Raises `ValueError` without any."""
        if matrices := block_matrices(model):
            return matrices
        name = type(self).__name__.removesuffix("Config")
        raise ValueError(f"{name} needs a model with blocks: this model lacks matrices within an nn.ModuleList")

    def groups(self: Any, model: nn.Module, exclude: frozenset[nn.Parameter] = frozenset()) -> list[dict[str, Any]]:
        """Return the groups of all trainable parameters outside `exclude`."""
        groups = parameter_groups(model, self.weight_decay, self.decay_scope, exclude)
        return [{**group, "initial_lr": self.lr} for group in groups]


@dataclass(frozen=True, kw_only=True)
class _AdamSettings(_Settings):
    lr: Annotated[float, Range(gt=0)] = 3e-4
    betas: Annotated[tuple[float, float], Range(0, lt=1)] = (0.9, 0.96)
    eps: Annotated[float, Range(gt=0, le=1)] = 1e-8
    weight_decay: Annotated[float, Range(0)] = 4.5e-2
    decay_scope: DecayScope = "matrices"


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(_AdamSettings):
    """AdamW (Loshchilov & Hutter 2019)."""

    def build(self, model: nn.Module, exclude: frozenset[nn.Parameter] = frozenset()) -> list[torch.optim.Optimizer]:
        groups = self.groups(model, exclude)
        if any(p.dtype in HALF_FORMATS for group in groups for p in group["params"]):
            groups = [{**group, "quantize_state": False} for group in groups]  # torch's AdamW: moments in 16 bits
            return [adamw.AdamW16(groups, lr=self.lr, betas=self.betas, eps=self.eps, max_exp_avg_sq=inf)]
        fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
        return [torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)]


@dataclass(frozen=True, kw_only=True)
class MuonConfig(_Settings):
    """Muon (Jordan et al. 2024) for the matrices of a model's blocks, AdamW for all other parameters.

    An update is the momentum with its singular values brought near 1, times `lr * sqrt(max(1, rows / columns))`. Small
    priors need fewer samples with Muon than with AdamW
    (docs/log/2026-11-21.md, "Small batches and Muon for the prior").

    Args:
        momentum: decay per step of the running mean of gradients.
        fallback_adamw: settings for parameters outside the matrices of blocks.
    """

    needs_blocks = gathers_matrices = True
    lr: Annotated[float, Range(gt=0)] = 0.02
    momentum: Annotated[float, Range(0, lt=1)] = 0.95
    weight_decay: Annotated[float, Range(0)] = 0.01
    fallback_adamw: AdamWConfig = field(default_factory=AdamWConfig)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = self.block_matrices(model)
        group = {"params": matrices, "initial_lr": self.lr}
        return [
            muon.Muon([group], lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay),
            *self.fallback_adamw.build(model, frozenset(matrices)),
        ]


@dataclass(frozen=True, kw_only=True)
class AdamW16Config(_AdamSettings):
    """AdamW with 16-bit moments for the matrices of a model's blocks, and fp32 moments for gains, biases, embeddings
    and output layers (Ramesh et al. 2021, App. D.2).

    Args:
        max_exp_avg_sq: upper bound of the running mean of squares (B.2).
    """

    needs_blocks = True
    max_exp_avg_sq: Annotated[float, Range(gt=0)] = 5.0

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = frozenset(self.block_matrices(model))
        others = frozenset(model.parameters()) - matrices
        groups = [
            {**group, "quantize_state": quantize}
            for quantize, excluded in ((True, others), (False, matrices))
            for group in self.groups(model, excluded)
        ]
        return [adamw.AdamW16(groups, self.lr, self.betas, self.eps, max_exp_avg_sq=self.max_exp_avg_sq)]


@dataclass(frozen=True, kw_only=True)
class StableAdamWConfig(_AdamSettings):
    """AdamW that divides the learning rate of a tensor by RMS_t where RMS_t is above 1 (Wortsman et al. 2023,
    Algorithm 2). Replaces clipping by `clip_norm`.

    Args:
        clip_decay: divide weight decay by RMS_t, too (`optim/stable_adamw.py`).
    """

    betas: Annotated[tuple[float, float], Range(0, lt=1)] = (0.9, 0.99)
    eps: Annotated[float, Range(gt=0, le=1)] = 1e-6
    clip_decay: bool = True

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = self.groups(model)
        return [stable_adamw.StableAdamW(groups, self.lr, self.betas, self.eps, clip_decay=self.clip_decay)]


@dataclass(frozen=True, kw_only=True)
class Beta2WarmupAdamWConfig(_Settings):
    """AdamW with beta2 = 1 - t^-power at step t (Wortsman et al. 2023, Figure 14).

    Args:
        beta1: decay per step of the running mean of gradients.
        power: exponent of the beta2 schedule.
    """

    lr: Annotated[float, Range(gt=0)] = 3e-4
    beta1: Annotated[float, Range(0, lt=1)] = 0.9
    power: Annotated[float, Range(gt=0)] = 0.5
    eps: Annotated[float, Range(gt=0, le=1)] = 1e-8
    weight_decay: Annotated[float, Range(0)] = 4.5e-2
    decay_scope: DecayScope = "matrices"

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [adamw.Beta2WarmupAdamW(self.groups(model), self.lr, self.beta1, self.power, self.eps)]


@dataclass(frozen=True, kw_only=True)
class LionConfig(_Settings):
    """Lion (Chen et al. 2023). Needs a learning rate 3 to 10 times smaller than AdamW's, and a larger weight decay."""

    lr: Annotated[float, Range(gt=0)] = 6e-5
    betas: Annotated[tuple[float, float], Range(0, lt=1)] = (0.9, 0.99)
    weight_decay: Annotated[float, Range(0)] = 0.2
    decay_scope: DecayScope = "matrices"

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [lion.Lion(self.groups(model), self.lr, self.betas)]


OptimizerConfig = AdamWConfig | MuonConfig | AdamW16Config | StableAdamWConfig | Beta2WarmupAdamWConfig | LionConfig
