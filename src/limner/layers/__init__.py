"""Attention patterns, caches and linear layers. The linear layers that train in eight bits work in any model:

from limner.layers import SwitchBackLinear
from limner.layers.convert import convert

convert(model.blocks, SwitchBackLinear.from_linear)
"""

from limner.layers.float8 import Fp8SwitchBackLinear, Fp8TensorWiseLinear
from limner.layers.switchback import (
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
