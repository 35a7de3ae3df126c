"""Floating-point formats of up to 16 bits, such as 1-6-9 and 0-6-10: packed into integers and unpacked.

A format s-e-m has s sign bits (1 or 0), e exponent bits and m bits of the significand, in this order from the highest
bit. With bias b, a code with exponent field E > 0 and significand field M stands for

    2^(E - b) (1 + M / 2^m)        and with E = 0, subnormal, for        2^(1 - b) M / 2^m.

Every code is a finite number: none is kept for infinities or NaN. What is too large, infinities included, takes the
largest magnitude with its own sign, as App. E.2 of Ramesh et al. 2021 has it ("we clamp any infinities ... to the
maximum value of the 1-6-9 format (which is slightly less than 16)"). NaN is packed as an infinity: whoever must see it
looks before packing. What is negative becomes 0 in a format without sign. -0 keeps its sign in one that has it.

Why these formats: a 16-bit float spends 5 bits on the exponent, and Adam's moments span more than its 2^-24 .. 2^16.
One bit more, and the range moved downwards, holds gradients and their squares without a scale (B.2: 1-6-9 for the
running mean, 0-6-10 for the running variance, which needs no sign). A maximum slightly under 16 makes the bias 60 if
all codes are numbers. The paper says nothing of the other format's bias; ours is the same: it holds the largest
variance, 5, and reaches down to 2^-69.

How it is computed: for |x| in [2^k, 2^(k+1)) the format's step is 2^(k-m). Adding 2^(k-m+23) to |x| leaves fp32 no
room for anything finer than that step, so that the hardware rounds the sum to it: to nearest, ties to even. The lowest
bits of the sum are then the significand with its leading one. Below the smallest normal number k stays what it is
there, which rounds subnormals by the same formula. No branch, no table, no second rounding. The plain definition is in
tests/reference/test_formats.py, equal on every code, at ties and beside them, and on random bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from limner.numerics.compile_elementwise import Fused
from limner.validation import Checked, Range

_FRACTION = 23  # bits of an fp32 significand
_FP32_BIAS = 127
_MAGNITUDE = 0x7FFFFFFF
_EXPONENT = 0x7F800000
_PIECE = 1 << 15  # values whose intermediate results stay in a core's cache


@dataclass(frozen=True)
class FloatFormat(Checked):
    """`sign` (0 or 1), `exponent` and `mantissa` bits, 16 at most in all. `bias` is 2^(exponent - 1) - 1 by default,
    as IEEE 754 has it.

    Raises `ValueError` for a format that cannot be computed in fp32: eight bits of exponent (torch's bfloat16), or a
    bias that moves its numbers to the ends of fp32's range.
    """

    sign: Annotated[int, Range(0, 1)]
    exponent: Annotated[int, Range(1, 7)]
    mantissa: Annotated[int, Range(1, 15)]
    bias: Annotated[int | None, Range(-200, 200)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits > 16:
            raise ValueError(f"{self} is no format of 16 bits or less")
        if 1 - self._bias - self.mantissa < -126 or self._highest + _FRACTION - self.mantissa > 127:
            raise ValueError(f"{self} reaches beyond fp32: choose a bias nearer to {2 ** (self.exponent - 1) - 1}")

    def __reduce__(self) -> tuple[type[FloatFormat], tuple[int | None, ...]]:
        return FloatFormat, (self.sign, self.exponent, self.mantissa, self.bias)  # without what was compiled for it

    def __str__(self) -> str:
        return f"{self.sign}-{self.exponent}-{self.mantissa}"

    @property
    def bits(self) -> int:
        return self.sign + self.exponent + self.mantissa

    @property
    def dtype(self) -> torch.dtype:
        """Of codes: uint8 if they fit; else int16, whose bits are the code's."""
        return torch.uint8 if self.bits <= 8 else torch.int16

    @property
    def maximum(self) -> float:
        """The largest number."""
        return 2.0**self._highest * (2 - 2.0**-self.mantissa)

    @property
    def smallest(self) -> float:
        """The smallest number above zero."""
        return 2.0 ** (1 - self._bias - self.mantissa)

    def pack(
        self,
        x: Float[Tensor, "*shape"],
        generator: torch.Generator | None = None,
        out: Integer[Tensor, "*shape"] | None = None,
    ) -> Integer[Tensor, "*shape"]:
        """Codes of the nearest numbers, ties to even; x is converted to fp32 first if it is something else.

        With a `generator`, rounding is stochastic instead: up or down to a neighbour, with probabilities that make the
        mean x. Codes go to `out` if given, wherever it lies; else, in memory, they are in the order of x.
        """
        x = _dense(x.detach().float())
        codes = torch.empty_like(x, dtype=self.dtype) if out is None else out
        if codes.dtype != self.dtype or codes.shape != x.shape:
            raise ValueError(f"codes in {self} of {list(x.shape)} need an `out` of {self.dtype} and of that shape")
        if codes is not _dense(codes):
            return codes.copy_(self.pack(x, generator))
        if codes.stride() != x.stride():
            x = torch.empty_like(codes, dtype=x.dtype).copy_(x)
        values, into = _flat(x), _flat(codes)
        if generator is not None:
            for part, place in _pieces(values, into):
                noise = torch.rand(part.shape, generator=generator, device=part.device)
                place.copy_(self._encoded(part, noise))
        elif self._pack.compiles(values):
            self._pack(values, into)
        else:
            for part, place in _pieces(values, into):
                self._pack(part, place)
        return codes

    def unpack(self, codes: Integer[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The numbers, in fp32, exactly."""
        codes = _dense(codes)
        x = torch.empty_like(codes, dtype=torch.float32)
        source, into = _flat(codes), _flat(x)
        if self._unpack.compiles(source):
            self._unpack(source, into)
        else:
            for part, place in _pieces(source, into):
                self._unpack(part, place)
        return x

    def rounded(self, x: Float[Tensor, "*shape"], generator: torch.Generator | None = None) -> Float[Tensor, "*shape"]:
        """What is left of x after packing, in fp32."""
        return self.unpack(self.pack(x, generator))

    @property
    def _bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1 if self.bias is None else self.bias

    @property
    def _highest(self) -> int:
        """Exponent of the largest number."""
        return 2**self.exponent - 1 - self._bias

    @property
    def lowest(self) -> int:
        """fp32's exponent field of the smallest normal number."""
        return 1 - self._bias + _FP32_BIAS

    @property
    def largest(self) -> int:
        """fp32's bits of the largest number."""
        return ((self._highest + _FP32_BIAS + 1) << _FRACTION) - (1 << _FRACTION - self.mantissa)

    @cached_property
    def _pack(self) -> Fused:
        return Fused(lambda x, codes: codes.copy_(self._encoded(x, None)))

    @cached_property
    def _unpack(self) -> Fused:
        return Fused(lambda codes, x: x.copy_(self._decoded(codes)))

    def _encoded(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Codes of fp32 values [n]; `noise` in [0, 1) [n] rounds stochastically."""
        m, shift = self.mantissa, _FRACTION - self.mantissa
        lowest, largest = self.lowest, self.largest
        bits = x.view(torch.int32)
        magnitude = (bits & _MAGNITUDE).clamp_max(largest) if self.sign else bits.clamp(0, largest)
        exponent = (magnitude & _EXPONENT).clamp_min(lowest << _FRACTION)
        adder = exponent + (shift << _FRACTION)
        total = magnitude.view(torch.float32) + adder.view(torch.float32)
        significand = total.view(torch.int32) - adder  # with the leading one, in steps
        codes = significand + (exponent >> shift) - (lowest << m)
        if noise is not None:
            left = magnitude.view(torch.float32) - (total - adder.view(torch.float32))  # exact, half a step at most
            step = (exponent - (m << _FRACTION)).view(torch.float32)
            codes = codes + (left.sign() * (noise * step < left.abs())).int()
        if self.sign:
            codes = codes | ((bits >> 31 << (self.bits - 1)) & (-1 if self.bits == 16 else 2**self.bits - 1))
        elif self.bits == 16:
            codes = codes << 16 >> 16  # as int16 has them
        return codes.to(self.dtype)

    def _decoded(self, codes: Tensor) -> Tensor:
        """fp32 values of codes [n]."""
        m, codes = self.mantissa, codes.int()
        number = codes & (2 ** (self.exponent + m) - 1)
        exponent = (number >> m).clamp_min(1)  # of subnormals, too
        significand = number - ((exponent - 1) << m)  # with the leading one, in steps
        x = significand.float() * ((exponent + (_FP32_BIAS - self._bias - m)) << _FRACTION).view(torch.float32)
        if not self.sign:
            return x
        negative = codes << (32 - self.bits) & ~_MAGNITUDE
        return (x.view(torch.int32) | negative).view(torch.float32)


E6M9 = FloatFormat(1, 6, 9, bias=60)
"""1-6-9, for Adam's running mean and for compressed gradients: up to 15.98, steps of 2^-68 near zero (B.2, E.2)."""

UE6M10 = FloatFormat(0, 6, 10, bias=60)
"""0-6-10, for Adam's running variance: up to 15.99, steps of 2^-69 near zero (B.2)."""

HALVES = {torch.float16: FloatFormat(1, 5, 10), torch.bfloat16: FloatFormat(1, 7, 7)}
"""torch's own formats of 16 bits, with what rounds values for them. fp16 has no infinities here; of bfloat16's
exponents it is the middle, 2^-69 to 2^64, which weights do not leave."""


def _dense(x: Tensor) -> Tensor:
    """x itself if its values fill a stretch of memory, in whatever order; else a copy."""
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()


def _flat(x: Tensor) -> Tensor:
    """A dense tensor's values in the order of memory: the same memory, [n]."""
    return x.as_strided((x.numel(),), (1,))


def _pieces(*flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors [n] in parts that are computed at once: small ones on a CPU, where intermediate results then stay in its
    cache, larger ones on GPUs, so that these results take little memory."""
    size = _PIECE if flat[0].device.type == "cpu" else 1 << 24
    return zip(*(x.split(size) for x in flat), strict=True)
