"""Precisions that convert a transformer's blocks: computed in eight bits (Wortsman et al. 2023), or stored in sixteen
(Ramesh et al. 2021).

As in both papers (§2.2 and Figure 7; App. D.2), a precision converts the linear layers of the blocks. Embeddings,
heads and the patch convolution are unchanged. With eight bits, operations between the layers run as under `Auto`.

Precisions in `TrainingPrecision` are without settings, so a recipe and the command line name them in one word:
`--prior.training.precision switchback`. `SimulatedGradients` has a setting, and is for experiments in Python.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from limner.numerics.formats import FloatFormat
from limner.numerics.precision import Auto, Fp16, Fp32, Precision
from limner.quantization import low_precision
from limner.quantization.convert import convert
from limner.quantization.low_precision import HalfLinear, LowPrecisionLinear
from limner.quantization.simulated_gradients import SimulatedGradientLinear


class SwitchBack(Auto):
    """int8, with the weight gradient in 16 bits."""

    converts = True
    layer: ClassVar[type[LowPrecisionLinear]] = low_precision.SwitchBackLinear

    def apply(self, model: nn.Module) -> nn.Module:
        return convert(model, self.layer.from_linear, in_blocks)


class SwitchBackM(SwitchBack):
    """`SwitchBack` that saves int8 for the backward pass."""

    layer = low_precision.SwitchBackMLinear


class SwitchBackQ(SwitchBack):
    """`SwitchBack` with a scale for each row or column of a weight."""

    layer = low_precision.SwitchBackQLinear


class LLMInt8(SwitchBack):
    """int8 in all three products."""

    layer = low_precision.LLMInt8Linear


class Fp8SwitchBack(SwitchBack):
    """float8, with the weight gradient in 16 bits."""

    layer = low_precision.Fp8SwitchBackLinear


class Fp8TensorWise(SwitchBack):
    """float8 in all three products, with one scale for each matrix."""

    layer = low_precision.Fp8TensorWiseLinear


class Fp16Weights(Fp16):
    """`Fp16` that also stores the matrices of the blocks and their gradients in fp16, without a copy in fp32 (Ramesh et
    al. 2021, §2.4 and App. D.2)."""

    converts = True

    def apply(self, model: nn.Module) -> nn.Module:
        return convert(model, lambda layer: HalfLinear.from_linear(layer, self.format), in_blocks)


class Bf16Weights(Fp16Weights):
    """`Fp16Weights` in bfloat16, without gradient scales; weights have three binary digits less."""

    format = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class SimulatedGradients(Fp32):
    """fp32, with the gradients of the blocks' linear layers rounded to `gradient_format`."""

    converts = True
    gradient_format: FloatFormat

    def apply(self, model: nn.Module) -> nn.Module:
        return convert(model, lambda layer: SimulatedGradientLinear(layer, self.gradient_format), in_blocks)


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
)  # choices of a recipe


def in_blocks(name: str, layer: nn.Linear) -> bool:
    """Return True if a layer, by its dotted name, belongs to the blocks of a transformer or of CLIP's encoders."""
    return not {"blocks", "image_blocks", "text_blocks"}.isdisjoint(name.split("."))
