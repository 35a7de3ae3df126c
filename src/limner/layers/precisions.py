"""Precisions that change a transformer's blocks: computed in eight bits (Wortsman et al. 2023), or stored in sixteen
(Ramesh et al. 2021).

As both papers have it, what is converted is all linear layers within the transformer (§2.2, Figure 7 of the one, App.
D.2 of the other): those of its blocks. Embeddings, heads and the convolution that reads patches stay as they are. With
eight bits so does everything between the layers, which runs as `Auto` says. The layers themselves are in
`switchback.py`, `float8.py` and `half_linear.py`.

Those of `TrainingPrecision` have no settings, so a recipe and the command line name them in one word:
`--prior.training.precision switchback`. `Narrow` has one, and is for experiments in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from limner.layers.convert import convert
from limner.layers.float8 import Fp8SwitchBackLinear, Fp8TensorWiseLinear
from limner.layers.half_linear import HalfLinear
from limner.layers.low_precision import LowPrecisionLinear
from limner.layers.simulated_gradients import NarrowLinear
from limner.layers.switchback import LLMInt8Linear, SwitchBackLinear, SwitchBackMLinear, SwitchBackQLinear
from limner.numerics.formats import FloatFormat
from limner.numerics.precision import Auto, Bf16, Fp16, Fp32, Precision


@dataclass(frozen=True, kw_only=True)
class SwitchBack(Auto):
    """int8, with the weight gradient in 16 bits."""

    converts = True
    layer: ClassVar[type[LowPrecisionLinear]] = SwitchBackLinear

    def apply(self, model: nn.Module) -> nn.Module:
        return convert(model, self.layer.of, in_blocks)


@dataclass(frozen=True, kw_only=True)
class SwitchBackM(SwitchBack):
    """`SwitchBack` that saves int8 for the backward pass."""

    layer = SwitchBackMLinear


@dataclass(frozen=True, kw_only=True)
class SwitchBackQ(SwitchBack):
    """`SwitchBack` with a scale for each row or column of a weight."""

    layer = SwitchBackQLinear


@dataclass(frozen=True, kw_only=True)
class LLMInt8(SwitchBack):
    """int8 in all three products."""

    layer = LLMInt8Linear


@dataclass(frozen=True, kw_only=True)
class Fp8SwitchBack(SwitchBack):
    """float8, with the weight gradient in 16 bits."""

    layer = Fp8SwitchBackLinear


@dataclass(frozen=True, kw_only=True)
class Fp8TensorWise(SwitchBack):
    """float8 in all three products, with one scale for each matrix."""

    layer = Fp8TensorWiseLinear


@dataclass(frozen=True, kw_only=True)
class Fp16Weights(Fp16):
    """`Fp16` that also stores the matrices of the blocks in fp16, with their gradients, and no copy of them in fp32
    (Ramesh et al. 2021, §2.4 and App. D.2)."""

    converts = True

    def apply(self, model: nn.Module) -> nn.Module:
        return convert(model, lambda layer: HalfLinear.of(layer, torch.float16), in_blocks)


@dataclass(frozen=True, kw_only=True)
class Bf16Weights(Bf16):
    """The same in bfloat16, which needs no gradient scales; weights have three digits less."""

    converts = True

    def apply(self, model: nn.Module) -> nn.Module:
        return convert(model, lambda layer: HalfLinear.of(layer, torch.bfloat16), in_blocks)


@dataclass(frozen=True, kw_only=True)
class Narrow(Fp32):
    """The gradients of the blocks' linear layers are rounded to a format; all else is fp32."""

    converts = True
    form: FloatFormat

    def apply(self, model: nn.Module) -> nn.Module:
        return convert(model, lambda layer: NarrowLinear(layer, self.form), in_blocks)


TrainingPrecision = (
    Precision
    | Fp16Weights
    | Bf16Weights
    | SwitchBack
    | SwitchBackM
    | SwitchBackQ
    | LLMInt8
    | Fp8SwitchBack
    | Fp8TensorWise
)  # what a recipe may choose


def in_blocks(name: str, layer: nn.Linear) -> bool:
    """Whether a layer, by its dotted name, belongs to the blocks of a transformer."""
    return "blocks." in name
