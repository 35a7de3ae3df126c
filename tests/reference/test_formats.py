"""Number formats against their definition, for every code and bit."""

from fractions import Fraction
from math import inf, isnan

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from limner.numerics import compile_elementwise
from limner.numerics.formats import E6M9, UE6M10, FloatFormat

E4M3, E5M2 = FloatFormat(1, 4, 3), FloatFormat(1, 5, 2)
FORMATS = [
    E6M9,
    UE6M10,
    E4M3,
    E5M2,
    FloatFormat(1, 5, 10),
    FloatFormat(0, 1, 1),
    FloatFormat(1, 7, 4),
    FloatFormat(0, 5, 11),
]


def bias_of(f: FloatFormat) -> int:
    return 2 ** (f.exponent - 1) - 1 if f.bias is None else f.bias


def value(f: FloatFormat, code: int) -> float:
    """Value of a code by definition, in double precision."""
    field, m = code >> f.mantissa & (2**f.exponent - 1), code % 2**f.mantissa / 2**f.mantissa
    x = 2.0 ** (1 - bias_of(f)) * m if field == 0 else 2.0 ** (field - bias_of(f)) * (1 + m)
    return -x if f.sign and code >> (f.bits - 1) else x


def nearest(f: FloatFormat, x: float) -> int:
    """Code of the nearest number, in rational arithmetic, with ties to even codes."""
    negative = np.signbit(x)
    if negative and not f.sign:
        return 0
    most = 2 ** (f.exponent + f.mantissa) - 1
    size = abs(x)
    if isnan(x) or size >= value(f, most):
        code = most
    else:
        exact = Fraction(size)
        low, high = 0, most  # bisection: numbers grow with their codes
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if Fraction(value(f, middle)) <= exact else (low, middle)
        below, above = exact - Fraction(value(f, low)), Fraction(value(f, high)) - exact
        code = low if below < above or (below == above and low % 2 == 0) else high
    return code | (negative and f.sign) << (f.bits - 1)


def every_code(f: FloatFormat) -> torch.Tensor:
    codes = torch.arange(2**f.bits)
    return codes.to(f.dtype)


def bits(f: FloatFormat, codes: torch.Tensor) -> list[int]:
    return (codes.long() & (2**f.bits - 1)).tolist()


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_every_code_decodes_to_its_value_and_back(f: FloatFormat) -> None:
    codes = every_code(f)
    x = f.unpack(codes)
    assert x.double().tolist() == [value(f, code) for code in range(2**f.bits)]
    assert torch.equal(f.pack(x), codes)
    assert x.max() == f.max and x[x > 0].min() == value(f, 1)
    assert torch.equal(f.round(x).view(torch.int32), x.view(torch.int32))  # -0 too


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_rounding_is_to_nearest_ties_to_even(f: FloatFormat) -> None:
    """Ties and the fp32 numbers next to them, ends of the range, NaN and infinities, random bits."""
    generator = torch.Generator().manual_seed(0)
    x = f.unpack(every_code(f)).double()
    x = x[torch.randperm(len(x), generator=generator)[:300]]
    halves = torch.cat([x * (1 + 2.0 ** -(f.mantissa + 1)), x + value(f, 1) / 2, x - value(f, 1) / 2]).float()
    ends = torch.tensor([0.0, -0.0, f.max, value(f, 1) / 2, value(f, 1) * 1.5, inf, -inf, float("nan"), 3e38, -3e38])
    ends = torch.cat([ends, torch.tensor([1e-45, -1e-45, 1.1754944e-38, 1e-39])])
    up, down = torch.tensor(inf), torch.tensor(-inf)
    noise = torch.randint(-(2**31), 2**31, (1000,), generator=generator).int().view(torch.float32)
    near = torch.randn(1000, generator=generator) * 2.0 ** torch.randint(-75, 6, (1000,), generator=generator)
    every = torch.cat([t for base in (halves, ends) for t in (base, base.nextafter(up), base.nextafter(down))])
    every = torch.cat([every, noise, near])
    assert bits(f, f.pack(every)) == [nearest(f, v) for v in every.tolist()]


@pytest.mark.parametrize(("f", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)], ids=str)
def test_eight_bits_agree_with_those_of_torch(f: FloatFormat, dtype: torch.dtype) -> None:
    """Codes are equal up to torch's largest number. Above it torch has NaN (S.1111.111 of e4m3fn) or infinities and NaN
    (the last exponent of e5m2), where limner has numbers up to 480 and 114,688 and saturates."""
    theirs = every_code(f).view(dtype).float()
    finite = theirs.isfinite()
    assert torch.equal(f.unpack(every_code(f))[finite], theirs[finite])
    largest = torch.finfo(dtype).max
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 5, 20_000)
    x = x.clamp(-largest, largest)
    assert torch.equal(f.pack(x), x.to(dtype).view(torch.uint8))
    assert f.max > largest and f.round(torch.tensor([3e38])) == f.max


@pytest.mark.parametrize("f", [E6M9, UE6M10, E4M3], ids=str)
def test_stochastic_rounding_has_the_mean_of_x(f: FloatFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    for x in (1.3, -0.7, 3 * value(f, 1) / 4, 2.6 * value(f, 1), 1.0, 0.0, 1e9):
        if x < 0 and not f.sign:
            continue
        samples = f.round(torch.full((n,), x), generator).double()
        codes = [nearest(f, x) + i for i in (-1, 0, 1)]
        assert set(samples.tolist()) <= {value(f, max(code, 0)) for code in codes}
        target = min(x, f.max)
        spread = samples.std().item() / n**0.5
        assert abs(samples.mean().item() - target) <= 5 * spread + abs(target) * 2e-7
    x = torch.randn(1000)
    repeated = [f.pack(x, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*repeated)


@given(st.integers(0, 1), st.integers(1, 7), st.integers(1, 12), st.integers(-40, 90), st.floats(width=32))
@settings(max_examples=300, deadline=None)
def test_any_format_is_rejected_or_rounds_as_defined(
    sign: int, exponent: int, mantissa: int, bias: int, x: float
) -> None:
    try:
        f = FloatFormat(sign, exponent, mantissa, bias)
    except ValueError:
        return
    code = f.pack(torch.tensor([x], dtype=torch.float32))
    assert bits(f, code) == [nearest(f, x)]
    assert f.unpack(code).item() == value(f, nearest(f, x))


@pytest.mark.parametrize("f", [E6M9, UE6M10, E4M3], ids=str)
def test_compiled_code_gives_the_same_bits(f: FloatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_elementwise, "MIN_COMPILED_SIZE", 1 << 14)
    x = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0)).int().view(torch.float32)
    f = FloatFormat(f.sign, f.exponent, f.mantissa, f.bias)
    codes = f.pack(x)
    if not f.compiled_pack.works:
        pytest.skip("there is no compiler")
    assert torch.equal(codes, f.encode(x, None))
    assert torch.equal(f.unpack(codes), f.decode(codes))
    assert f.compiled_pack.compiled is not None and f.compiled_unpack.compiled is not None


def test_sixteen_bit_formats_have_the_ranges_of_the_paper() -> None:
    assert 15.9 < E6M9.max < 16 and UE6M10.max > 5
    assert E6M9.bits == UE6M10.bits == 16
