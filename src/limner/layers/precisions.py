"""Precisions that train a transformer's blocks in eight bits (Wortsman et al. 2023).

As the paper has it, what is converted is all linear layers within the transformer (§2.2, Figure 7): those of its
blocks. Embeddings, heads and the convolution that reads patches stay as they are, and so does everything between the
layers, which runs as `Auto` says. The layers themselves are in `switchback.py` and `float8.py`.

Those of `TrainingPrecision` have no settings, so a recipe and the command line name them in one word:
`--prior.training.precision switchback`. `Narrow` has one, and is for experiments in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from limner.layers.convert import convert
from limner.layers.float8 import Fp8SwitchBackLinear, Fp8TensorWiseLinear
from limner.layers.low_precision import LowPrecisionLinear
from limner.layers.narrow import NarrowLinear
from limner.layers.switchback import LLMInt8Linear, SwitchBackLinear, SwitchBackMLinear, SwitchBackQLinear
from limner.numerics.formats import FloatFormat
from limner.numerics.precision import Auto, Fp32, Precision


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
class Narrow(Fp32):
    """The gradients of the blocks' linear layers are rounded to a format; all else is fp32."""

    converts = True
    form: FloatFormat

    def apply(self, model: nn.Module) -> nn.Module:
        return convert(model, lambda layer: NarrowLinear(layer, self.form), in_blocks)


TrainingPrecision = (
    Precision | SwitchBack | SwitchBackM | SwitchBackQ | LLMInt8 | Fp8SwitchBack | Fp8TensorWise
)  # what a recipe may choose


def in_blocks(name: str, layer: nn.Linear) -> bool:
    """Whether a layer, by its dotted name, belongs to the blocks of a transformer."""
    return "blocks." in name
