"""float8 numbers are exactly those of the formats, and scaled so that the largest fits."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from limner import compat
from limner.quantization import float8
from limner.quantization.float8 import E4M3, E5M2

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
def test_numbers_of_a_format_and_what_lies_between_two(format):
    there = numbers(format)
    exact = torch.tensor(there)
    assert torch.equal(float8.round_to_float8(exact, format).float(), exact)
    assert there[-1] == torch.finfo(format).max
    between = [(a + b) / 2 for a, b in itertools.pairwise(there)]
    near = [x for y in between for x in (y, y * (1 - 2**-20), y * (1 + 2**-20))]
    found = float8.round_to_float8(torch.tensor(near), format).float().tolist()
    assert found == [nearest(x, format) for x in near]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_any_number_goes_to_the_nearest_and_the_largest_is_never_passed(format, x):
    found = float8.round_to_float8(torch.tensor(x), format)
    assert found.float().item() == nearest(x, format)
    if abs(x) <= torch.finfo(format).max:
        assert torch.equal(found.view(torch.uint8), torch.tensor(x).to(format).view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_scales_use_all_of_a_format(format):
    torch.manual_seed(0)
    x = torch.randn(6, 40) * torch.logspace(-40, 30, 6)[:, None]
    x[3] = 0
    largest = torch.finfo(format).max
    values, scale = float8.row_wise(x, format)
    assert values.dtype == format and scale.dtype == torch.float32
    peaks = values.float().abs().amax(1)
    assert peaks[0] < 1 and peaks[3] == 0  # one row is too small for a scale of its own, one has no numbers
    assert (peaks[[1, 2, 4, 5]] == largest).all()
    step = 2.0 ** -FORMATS[format][1]  # relative, of a normal number
    near = (values.float() * scale[:, None] - x).abs()[1:] <= (x.abs() * step / 2)[1:] + scale[1:, None] * 2.0**-9
    assert near.all()
    whole, one = float8.tensor_wise(x, format)
    assert whole.float().abs().max() == largest and one.shape == ()
    x[1, 1] = torch.nan
    assert float8.row_wise(x, format)[1].isfinite().tolist() == [True, False, True, True, True, True]


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 3, 7), (40, 64, 32)])
@pytest.mark.parametrize("by_row", [False, True])
def test_the_simulated_product_is_that_of_the_numbers(m, n, k, by_row):
    torch.manual_seed(0)
    a, b = torch.randn(m, k).to(E5M2), torch.randn(n, k).to(E4M3)
    scale_a, scale_b, bias = torch.rand(m if by_row else ()), torch.rand(()), torch.randn(n)
    by = scale_a[:, None] if by_row else scale_a
    expected = by.double() * scale_b * (a.double() @ b.double().mT) + bias
    found = float8.product(a, b, scale_a, scale_b, bias)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("m", [1, 2])
def test_a_gpu_gets_rows_whatever_the_strides_of_a_side_of_1(monkeypatch, m, by_row):
    def scaled(a, b, scale_a, scale_b, out_dtype):
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, len(b))
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(float8, "select_kernel", lambda a, b: ("_scaled_mm", ""))
    monkeypatch.setattr(compat, "scaled_mm", scaled)
    torch.manual_seed(0)
    a, b = torch.randn(32, m).to(E5M2), torch.randn(32, 16).to(E4M3)
    scale_a, scale_b = torch.rand(m if by_row else ()), torch.rand(())
    expected = (scale_a[:, None] if by_row else scale_a) * scale_b * (a.float().mT @ b.float())
    found = float8.product(a.mT, b.mT, scale_a, scale_b)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
def test_the_gpus_product_is_the_simulated_one(by_row):
    a, b = torch.randn(64, 128, device="cuda"), torch.randn(48, 128, device="cuda")
    (x, s), (y, t) = (float8.row_wise if by_row else float8.tensor_wise)(a, E5M2), float8.tensor_wise(b, E4M3)
    if float8.select_kernel(x, y)[0] == "simulated":
        pytest.skip(float8.select_kernel(x, y)[1])
    found, expected = float8.product(x, y, s, t), float8.product(x.cpu(), y.cpu(), s.cpu(), t.cpu())
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
