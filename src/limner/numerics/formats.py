"""Floating-point formats of up to 16 bits, such as 1-6-9 and 0-6-10, packed into integers and unpacked.

A format s-e-m has s sign bits (1 or 0), e exponent bits and m bits of the significand, in this order from the highest
bit. With bias b, a code with exponent field E > 0 and significand field M stands for

    2^(E - b) (1 + M / 2^m)        and with E = 0, subnormal, for        2^(1 - b) M / 2^m.

Every code is a finite number: no code is reserved for infinities or NaN. Too large values, infinities included, become
the largest magnitude with the same sign, as in App. E.2 of Ramesh et al. 2021 ("we clamp any infinities ... to the
maximum value of the 1-6-9 format (which is slightly less than 16)"). NaN is packed as an infinity, so test for NaN
before packing. Negative values become 0 in a format without sign. -0 keeps its sign in a format with sign.

Why these formats: a 16-bit float spends 5 bits on the exponent, and Adam's moments span more than its 2^-24 .. 2^16.
One more bit, and a lower range, holds gradients and their squares without a scale (B.2: 1-6-9 for the running mean,
0-6-10 for the running variance, which is never negative). A maximum slightly under 16 implies bias 60 if all codes are
finite numbers. The paper does not give the bias of 0-6-10; ours is also 60, which holds the largest variance, 5, and
reaches down to 2^-69.

Algorithm: for |x| in [2^k, 2^(k+1)) the format's step is 2^(k-m). The fp32 sum |x| + 2^(k-m+23) has exactly that step,
so the hardware rounds to it: to nearest, ties to even. The lowest bits of the sum are then the significand with its
leading one. Below the smallest normal number k is constant, which rounds subnormals by the same formula.
tests/reference/test_formats.py has the plain definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from limner.numerics.compile_elementwise import CompiledElementwise
from limner.validation import Range, Validated

__all__ = ["E6M9", "HALF_FORMATS", "INT8_MAX", "MIN_ABSMAX", "UE6M10", "FloatFormat"]

INT8_MAX = 127  # the largest magnitude with both signs in int8; -128 is not used
MIN_ABSMAX = 2.0**-109  # smallest magnitude that is scaled to 8 bits: below, the scale's inverse could overflow fp32

_FP32_MANTISSA = 23  # bits of an fp32 significand
_FP32_BIAS = 127
_MAGNITUDE_MASK = 0x7FFFFFFF
_EXPONENT_MASK = 0x7F800000
_CPU_VALUES_PER_PART, _GPU_VALUES_PER_PART = 1 << 15, 1 << 24


@dataclass(frozen=True)
class FloatFormat(Validated):
    """A format of `sign` (0 or 1), `exponent` and `mantissa` bits, 16 at most in total. `bias` defaults to
    2^(exponent - 1) - 1, as in IEEE 754.

    Raises `ValueError` for a format that fp32 cannot compute: eight bits of exponent (torch's bfloat16), or a bias that
    moves its numbers to the ends of fp32's range.
    """

    sign: Annotated[int, Range(0, 1)]
    exponent: Annotated[int, Range(1, 7)]
    mantissa: Annotated[int, Range(1, 15)]
    bias: Annotated[int | None, Range(-200, 200)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits > 16:
            raise ValueError(f"{self} has {self.bits} bits: choose at most 16")
        if 1 - self._bias - self.mantissa < -126 or self._max_exponent + _FP32_MANTISSA - self.mantissa > 127:
            raise ValueError(f"{self} exceeds the range of fp32: choose a bias near {2 ** (self.exponent - 1) - 1}")

    def __reduce__(self) -> tuple[type[FloatFormat], tuple[int | None, ...]]:
        return FloatFormat, (self.sign, self.exponent, self.mantissa, self.bias)  # without compiled functions

    def __str__(self) -> str:
        return f"{self.sign}-{self.exponent}-{self.mantissa}"

    @property
    def bits(self) -> int:
        return self.sign + self.exponent + self.mantissa

    @property
    def dtype(self) -> torch.dtype:
        """Data type of codes: uint8 up to 8 bits, else int16 with the same bits."""
        return torch.uint8 if self.bits <= 8 else torch.int16

    @property
    def max(self) -> float:
        """The largest number."""
        return 2.0**self._max_exponent * (2 - 2.0**-self.mantissa)

    def pack(
        self,
        x: Float[Tensor, "*shape"],
        generator: torch.Generator | None = None,
        out: Integer[Tensor, "*shape"] | None = None,
    ) -> Integer[Tensor, "*shape"]:
        """Return codes of the nearest numbers, ties to even, after a conversion of x to fp32.

        With a `generator`, rounding is stochastic: up or down to an adjacent number, with mean x. Codes go to `out` if
        given, with any strides; else they have the memory order of x. Raises `ValueError` if `out` does not fit.
        """
        x = _dense(x.detach().float())
        codes = torch.empty_like(x, dtype=self.dtype) if out is None else out
        if codes.dtype != self.dtype or codes.shape != x.shape:
            raise ValueError(f"`out` must be {self.dtype} {list(x.shape)}, not {codes.dtype} {list(codes.shape)}")
        if codes is not _dense(codes):
            return codes.copy_(self.pack(x, generator))
        if codes.stride() != x.stride():
            x = torch.empty_like(codes, dtype=x.dtype).copy_(x)

        def encode_with_noise(part: Tensor, out: Tensor) -> None:
            out.copy_(self.encode(part, torch.rand(part.shape, generator=generator, device=part.device)))

        _convert(encode_with_noise if generator else self.compiled_pack, x, codes)
        return codes

    def unpack(self, codes: Integer[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the numbers of codes, exact in fp32."""
        codes = _dense(codes)
        x = torch.empty_like(codes, dtype=torch.float32)
        _convert(self.compiled_unpack, codes, x)
        return x

    def round(self, x: Float[Tensor, "*shape"], generator: torch.Generator | None = None) -> Float[Tensor, "*shape"]:
        """Round x to the format by packing and unpacking, in fp32."""
        return self.unpack(self.pack(x, generator))

    @property
    def _bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1 if self.bias is None else self.bias

    @property
    def _max_exponent(self) -> int:
        """Exponent of the largest number."""
        return 2**self.exponent - 1 - self._bias

    @property
    def min_exponent_field(self) -> int:
        """The exponent field, in fp32, of the smallest normal number."""
        return 1 - self._bias + _FP32_BIAS

    @property
    def max_bits(self) -> int:
        """The bits, in fp32, of the largest number."""
        return ((self._max_exponent + _FP32_BIAS + 1) << _FP32_MANTISSA) - (1 << _FP32_MANTISSA - self.mantissa)

    @cached_property
    def compiled_pack(self) -> CompiledElementwise:
        return CompiledElementwise(lambda x, codes: codes.copy_(self.encode(x, None)))

    @cached_property
    def compiled_unpack(self) -> CompiledElementwise:
        return CompiledElementwise(lambda codes, x: x.copy_(self.decode(codes)))

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return codes of fp32 values [n]; `noise` in [0, 1) [n] rounds stochastically."""
        m, shift = self.mantissa, _FP32_MANTISSA - self.mantissa
        lowest, largest = self.min_exponent_field, self.max_bits
        bits = x.view(torch.int32)
        magnitude = (bits & _MAGNITUDE_MASK).clamp_max(largest) if self.sign else bits.clamp(0, largest)
        exponent = (magnitude & _EXPONENT_MASK).clamp_min(lowest << _FP32_MANTISSA)
        adder = exponent + (shift << _FP32_MANTISSA)
        total = magnitude.view(torch.float32) + adder.view(torch.float32)
        significand = total.view(torch.int32) - adder  # with the leading one, in steps
        codes = significand + (exponent >> shift) - (lowest << m)
        if noise is not None:
            left = magnitude.view(torch.float32) - (total - adder.view(torch.float32))  # exact, half a step at most
            step = (exponent - (m << _FP32_MANTISSA)).view(torch.float32)
            codes = codes + (left.sign() * (noise * step < left.abs())).int()
        if self.sign:
            codes = codes | ((bits >> 31 << (self.bits - 1)) & (-1 if self.bits == 16 else 2**self.bits - 1))
        elif self.bits == 16:
            codes = codes << 16 >> 16  # sign extension, for int16
        return codes.to(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """Return fp32 values of codes [n]."""
        m, codes = self.mantissa, codes.int()
        number = codes & (2 ** (self.exponent + m) - 1)
        exponent = (number >> m).clamp_min(1)  # subnormals have the exponent of E = 1
        significand = number - ((exponent - 1) << m)  # with the leading one, in steps
        x = significand.float() * ((exponent + (_FP32_BIAS - self._bias - m)) << _FP32_MANTISSA).view(torch.float32)
        if not self.sign:
            return x
        negative = codes << (32 - self.bits) & ~_MAGNITUDE_MASK
        return (x.view(torch.int32) | negative).view(torch.float32)


E6M9 = FloatFormat(1, 6, 9, bias=60)
"""1-6-9, for Adam's running mean and for compressed gradients: up to 15.98, steps of 2^-68 near zero (B.2, E.2)."""

UE6M10 = FloatFormat(0, 6, 10, bias=60)
"""0-6-10, for Adam's running variance: up to 15.99, steps of 2^-69 near zero (B.2)."""

HALF_FORMATS = {torch.float16: FloatFormat(1, 5, 10), torch.bfloat16: FloatFormat(1, 7, 7)}
"""torch's 16-bit formats, each with a format that rounds for it: fp16 without infinities, and bfloat16 with the middle
of its exponents only, 2^-69 to 2^64, which holds weights."""


def _dense(x: Tensor) -> Tensor:
    """Return x if its values fill contiguous memory in some order of dimensions, else a copy."""
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()


def _convert(function: Callable[[Tensor, Tensor], object], source: Tensor, target: Tensor) -> None:
    """Call `function(values [n], out [n])` on dense tensors of the same strides, in memory order. A compiled function
    takes all values. Others take small parts on a CPU, so that intermediate results stay in its cache, and larger ones
    on a GPU, to bound the memory of these results."""
    size = _CPU_VALUES_PER_PART if source.device.type == "cpu" else _GPU_VALUES_PER_PART
    if isinstance(function, CompiledElementwise) and function.compiles(source):
        size = source.numel()
    flat = (x.as_strided((x.numel(),), (1,)).split(size) for x in (source, target))
    for part, out in zip(*flat, strict=True):
        function(part, out)
