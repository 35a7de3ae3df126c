"""Linear layers that train in eight or sixteen bits, in any model:

from limner.quantization import SwitchBackLinear
from limner.quantization.convert import convert

convert(model.blocks, SwitchBackLinear.from_linear)
"""

from limner.quantization.low_precision import (
    Fp8SwitchBackLinear,
    Fp8TensorWiseLinear,
    HalfLinear,
    LLMInt8Linear,
    StandardLinear,
    SwitchBackLinear,
    SwitchBackMLinear,
    SwitchBackQLinear,
)

__all__ = [
    "Fp8SwitchBackLinear",
    "Fp8TensorWiseLinear",
    "HalfLinear",
    "LLMInt8Linear",
    "StandardLinear",
    "SwitchBackLinear",
    "SwitchBackMLinear",
    "SwitchBackQLinear",
]
