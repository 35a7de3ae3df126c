"""Numbers in int8 are those of equation 1, for any row. float8 numbers are exactly those of the formats, and scaled so
that the largest fits."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from limner.quantization.quantize import E4M3, E5M2, dequantize, quantize, round_to_float8


def equation_1(x):
    """round(127 / absmax * x) of a row, as written."""
    return torch.round(torch.div(torch.tensor(127.0), x.abs().max()) * x).to(torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 5), (40, 3_000)])
def test_each_row_column_or_matrix_has_the_scale_of_its_largest_entry(m, n, dtype):
    torch.manual_seed(m)
    x = (torch.randn(m, n) * torch.logspace(-1, 1, m)[:, None]).to(dtype)
    values, scale = quantize(x, by_row=True)
    assert values.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.equal(values, torch.stack([equation_1(row.float()) for row in x]))
    columns, scales = quantize(x, by_row=True, transpose=True)
    assert torch.equal(columns, quantize(x.mT.contiguous(), by_row=True)[0]) and scales.shape == (n,)
    whole, one = quantize(x, by_row=False)
    assert torch.equal(whole, equation_1(x.float()))
    transposed, same = quantize(x, by_row=False, transpose=True)
    assert torch.equal(transposed, whole.mT) and torch.equal(same, one)
    for found, step in ((dequantize(values, scale), scale[:, None]), (dequantize(whole, one), one)):
        assert ((found - x.float()).abs() <= 0.5001 * step).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(-149, 127), st.integers(0, 2**31))
def test_rows_of_any_magnitude_come_back(exponent, seed):
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1) * 2.0**exponent
    x[1] = 0
    values, scale = quantize(x, by_row=True)
    assert scale.isfinite().all() and (scale > 0).all() and (values > -128).all()
    assert not values[1].any()
    assert ((dequantize(values, scale) - x).abs() <= 0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_nonfinite_values_are_not_hidden(wrong):
    x = torch.randn(3, 8)
    x[1, 2] = wrong
    assert quantize(x, by_row=True)[1].isfinite().tolist() == [True, False, True]
    assert not quantize(x, by_row=False)[1].isfinite()


FORMATS = {E4M3: (4, 3, 7), E5M2: (5, 2, 15)}  # bits of exponent and mantissa, bias


def numbers(format):
    """All finite ones, from their bits: 2^(e - bias) (1 + f), or 2^(1 - bias) f if e = 0."""
    exponent, mantissa, bias = FORMATS[format]
    found = set()
    for e, f in itertools.product(range(2**exponent), range(2**mantissa)):
        reserved = e == 2**exponent - 1 and (format == E5M2 or f == 2**mantissa - 1)  # infinity and NaN
        if not reserved:
            part = f / 2**mantissa
            found.add(2.0 ** (e - bias) * (1 + part) if e else 2.0 ** (1 - bias) * part)
    return sorted({-x for x in found} | found)


def nearest(x, format):
    """By search; of two that are as near the one whose last bit is 0, that is every other one from zero."""
    there = [value for value in numbers(format) if value >= 0]
    inside = min(abs(x), there[-1])
    i = min(range(len(there)), key=lambda i: (abs(there[i] - inside), i % 2))
    return there[i] if x >= 0 else -there[i]


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_of_a_format_and_midpoints_between_two(format):
    there = numbers(format)
    exact = torch.tensor(there)
    assert torch.equal(round_to_float8(exact, format).float(), exact)
    assert there[-1] == torch.finfo(format).max
    between = [(a + b) / 2 for a, b in itertools.pairwise(there)]
    near = [x for y in between for x in (y, y * (1 - 2**-20), y * (1 + 2**-20))]
    found = round_to_float8(torch.tensor(near), format).float().tolist()
    assert found == [nearest(x, format) for x in near]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_any_number_goes_to_the_nearest_and_the_largest_is_never_passed(format, x):
    found = round_to_float8(torch.tensor(x), format)
    assert found.float().item() == nearest(x, format)
    if abs(x) <= torch.finfo(format).max:
        assert torch.equal(found.view(torch.uint8), torch.tensor(x).to(format).view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_scales_use_all_of_a_format(format):
    torch.manual_seed(0)
    x = torch.randn(6, 40) * torch.logspace(-40, 30, 6)[:, None]
    x[3] = 0
    largest = torch.finfo(format).max
    values, scale = quantize(x, True, format)
    assert values.dtype == format and scale.dtype == torch.float32
    peaks = values.float().abs().amax(1)
    assert peaks[0] < 1 and peaks[3] == 0  # the first row is below the smallest scale, row 3 is zero
    assert (peaks[[1, 2, 4, 5]] == largest).all()
    step = 2.0 ** -FORMATS[format][1]  # relative, of a normal number
    near = (values.float() * scale[:, None] - x).abs()[1:] <= (x.abs() * step / 2)[1:] + scale[1:, None] * 2.0**-9
    assert near.all()
    whole, one = quantize(x, False, format)
    assert whole.float().abs().max() == largest and one.shape == ()
    x[1, 1] = torch.nan
    assert quantize(x, True, format)[1].isfinite().tolist() == [True, False, True, True, True, True]
