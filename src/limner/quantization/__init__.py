"""Attention patterns, caches and linear layers. The linear layers that train in eight bits work in any model:

from limner.quantization import SwitchBackLinear
from limner.quantization.convert import convert

convert(model.blocks, SwitchBackLinear.from_linear)
"""

from limner.quantization.float8 import Fp8SwitchBackLinear, Fp8TensorWiseLinear
from limner.quantization.switchback import (
    LLMInt8Linear,
    StandardLinear,
    SwitchBackLinear,
    SwitchBackMLinear,
    SwitchBackQLinear,
)

__all__ = [
    "Fp8SwitchBackLinear",
    "Fp8TensorWiseLinear",
    "LLMInt8Linear",
    "StandardLinear",
    "SwitchBackLinear",
    "SwitchBackMLinear",
    "SwitchBackQLinear",
]
