"""Which optimiser, as a configuration that builds it. A third one is another class here.

`build` gives a list of torch optimisers that together hold each trainable parameter once. Every
group keeps its own learning rate under `initial_lr`, as torch's schedulers do; a schedule multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import nn

from limner.optim import muon
from limner.optim.groups import Decayed, block_matrices, parameter_groups
from limner.ranges import Checked, Range


@dataclass(frozen=True, kw_only=True)
class AdamW(Checked):
    """Loshchilov & Hutter 2019. `decayed` says what weight decay acts on."""

    lr: Annotated[float, Range(above=0)] = 3e-4
    betas: Annotated[tuple[float, float], Range(0, below=1)] = (0.9, 0.96)
    eps: Annotated[float, Range(above=0)] = 1e-8
    weight_decay: Annotated[float, Range(0)] = 4.5e-2
    decayed: Decayed = "matrices"

    def build(self, model: nn.Module, exclude: frozenset[nn.Parameter] = frozenset()) -> list[torch.optim.Optimizer]:
        groups = parameter_groups(model, self.weight_decay, self.decayed, exclude)
        for group in groups:
            group["initial_lr"] = self.lr
        device = next(model.parameters()).device.type
        fused = device in ("cpu", "cuda")
        return [torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)]


@dataclass(frozen=True, kw_only=True)
class Muon(Checked):
    """Orthogonalised momentum for the matrices of a model's blocks, AdamW for all `others`.

    (Jordan et al. 2024.) An update is the momentum with its singular values brought near 1, times
    `lr * sqrt(max(1, rows / columns))`. Small priors learn more from each sample with it than with
    AdamW: see docs/LOG.md.
    """

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
