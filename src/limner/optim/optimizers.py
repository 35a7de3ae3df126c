"""Which optimiser, as a configuration that builds it. One more is another class here, and a member of `Optimizer`.

`build` gives a list of torch optimisers that together hold each trainable parameter once. Every
group keeps its own learning rate under `initial_lr`, as torch's schedulers do; a schedule multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from limner.numerics.formats import HALVES
from limner.optim import adamw16, beta2_warmup, lion, muon, stable_adamw
from limner.optim.param_groups import Decayed, block_matrices, parameter_groups
from limner.validation import Checked, Range


class _Settings(Checked):
    """What settings mean that several optimisers have.

    Args:
        lr: learning rate, which the schedule multiplies.
        betas: decays per step of the running means of gradients and of their squares.
        eps: added to the root of the running mean of squares.
        weight_decay: what weights lose per step, times the learning rate.
        decayed: what weight decay acts on.

    `for_blocks`: it is for the matrices of a model's blocks, and needs some. `whole`: its update of a matrix needs all
    of it, so that shards gather it.
    """

    for_blocks: ClassVar[bool] = False
    whole: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class AdamW(_Settings):
    """Loshchilov & Hutter 2019."""

    lr: Annotated[float, Range(above=0)] = 3e-4
    betas: Annotated[tuple[float, float], Range(0, below=1)] = (0.9, 0.96)
    eps: Annotated[float, Range(above=0, most=1)] = 1e-8
    weight_decay: Annotated[float, Range(0)] = 4.5e-2
    decayed: Decayed = "matrices"

    def build(self, model: nn.Module, exclude: frozenset[nn.Parameter] = frozenset()) -> list[torch.optim.Optimizer]:
        groups = parameter_groups(model, self.weight_decay, self.decayed, exclude)
        for group in groups:
            group["initial_lr"] = self.lr
        if any(p.dtype in HALVES for group in groups for p in group["params"]):  # torch's keeps moments in 16 bits then
            groups = [{**group, "packed": False} for group in groups]
            return [adamw16.AdamW16(groups, lr=self.lr, betas=self.betas, eps=self.eps, most=inf)]
        device = next(model.parameters()).device.type
        fused = device in ("cpu", "cuda")
        return [torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)]


@dataclass(frozen=True, kw_only=True)
class Muon(_Settings):
    """Orthogonalised momentum for the matrices of a model's blocks, AdamW for all `others`.

    (Jordan et al. 2024.) An update is the momentum with its singular values brought near 1, times
    `lr * sqrt(max(1, rows / columns))`. Small priors learn more from each sample with it than with
    AdamW: see docs/log/2026-11-21.md, "Small batches and Muon for the prior".

    Args:
        momentum: decay per step of the running sum of gradients.
        others: of what is no matrix of a block.
    """

    for_blocks = whole = True
    lr: Annotated[float, Range(above=0)] = 0.02
    momentum: Annotated[float, Range(0, below=1)] = 0.95
    weight_decay: Annotated[float, Range(0)] = 0.01
    others: AdamW = field(default_factory=AdamW)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = block_matrices(model)
        if not matrices:
            raise ValueError("Muon needs a model with blocks: this one has no matrix within an nn.ModuleList")
        group = {"params": matrices, "initial_lr": self.lr}
        return [
            muon.Muon([group], lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay),
            *self.others.build(model, frozenset(matrices)),
        ]


@dataclass(frozen=True, kw_only=True)
class AdamW16(_Settings):
    """AdamW whose moments take 16 bits for the matrices of a model's blocks, and fp32 for all else: gains, biases,
    embeddings and output layers (Ramesh et al. 2021, App. D.2).

    Args:
        most: largest running mean of squares (B.2).
    """

    for_blocks = True
    lr: Annotated[float, Range(above=0)] = 3e-4
    betas: Annotated[tuple[float, float], Range(0, below=1)] = (0.9, 0.96)
    eps: Annotated[float, Range(above=0, most=1)] = 1e-8
    weight_decay: Annotated[float, Range(0)] = 4.5e-2
    decayed: Decayed = "matrices"
    most: Annotated[float, Range(above=0)] = 5.0

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = frozenset(block_matrices(model))
        if not matrices:
            raise ValueError("AdamW16 needs a model with blocks: this one has no matrix within an nn.ModuleList")
        others = frozenset(model.parameters()) - matrices
        groups = [
            {**group, "packed": packed, "initial_lr": self.lr}
            for packed, excluded in ((True, others), (False, matrices))
            for group in parameter_groups(model, self.weight_decay, self.decayed, excluded)
        ]
        return [adamw16.AdamW16(groups, lr=self.lr, betas=self.betas, eps=self.eps, most=self.most)]


@dataclass(frozen=True, kw_only=True)
class StableAdamW(_Settings):
    """AdamW that divides the learning rate of each tensor by RMS_t where that is above 1 (Wortsman et al. 2023,
    Algorithm 2). Needs no `clip_norm`.

    Args:
        clip_decay: divide what weights lose by RMS_t, too (`optim/stable_adamw.py`).
    """

    lr: Annotated[float, Range(above=0)] = 3e-4
    betas: Annotated[tuple[float, float], Range(0, below=1)] = (0.9, 0.99)
    eps: Annotated[float, Range(above=0, most=1)] = 1e-6
    weight_decay: Annotated[float, Range(0)] = 4.5e-2
    decayed: Decayed = "matrices"
    clip_decay: bool = True

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = _groups(model, self.lr, self.weight_decay, self.decayed)
        return [stable_adamw.StableAdamW(groups, self.lr, self.betas, self.eps, clip_decay=self.clip_decay)]


@dataclass(frozen=True, kw_only=True)
class Beta2WarmupAdamW(_Settings):
    """AdamW whose beta2 is 1 - t^-power at step t (Wortsman et al. 2023, Figure 14).

    Args:
        beta1: decay per step of the running mean of gradients.
        power: of the step.
    """

    lr: Annotated[float, Range(above=0)] = 3e-4
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    power: Annotated[float, Range(above=0)] = 0.5
    eps: Annotated[float, Range(above=0, most=1)] = 1e-8
    weight_decay: Annotated[float, Range(0)] = 4.5e-2
    decayed: Decayed = "matrices"

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = _groups(model, self.lr, self.weight_decay, self.decayed)
        return [beta2_warmup.Beta2WarmupAdamW(groups, self.lr, self.beta1, self.power, self.eps)]


@dataclass(frozen=True, kw_only=True)
class Lion(_Settings):
    """Chen et al. 2023: the sign of a momentum. Learning rates are 3 to 10 times smaller than AdamW's, decay larger."""

    lr: Annotated[float, Range(above=0)] = 6e-5
    betas: Annotated[tuple[float, float], Range(0, below=1)] = (0.9, 0.99)
    weight_decay: Annotated[float, Range(0)] = 0.2
    decayed: Decayed = "matrices"

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [lion.Lion(_groups(model, self.lr, self.weight_decay, self.decayed), self.lr, self.betas)]


Optimizer = AdamW | Muon | AdamW16 | StableAdamW | Beta2WarmupAdamW | Lion


def _groups(model: nn.Module, lr: float, weight_decay: float, decayed: Decayed) -> list[dict[str, Any]]:
    """All trainable parameters, with the learning rate that a schedule multiplies."""
    return [{**group, "initial_lr": lr} for group in parameter_groups(model, weight_decay, decayed)]
