"""Numbers in 8 bits are those of equation 1, for any row."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from limner.quantization.quantize import column_wise, dequantize, row_wise, tensor_wise, tensor_wise_transposed


def equation_1(x):
    """round(127 / absmax * x) of a row, as written."""
    return torch.round(torch.div(torch.tensor(127.0), x.abs().max()) * x).to(torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 5), (40, 3_000)])
def test_each_row_column_or_matrix_has_the_scale_of_its_largest_entry(m, n, dtype):
    torch.manual_seed(m)
    x = (torch.randn(m, n) * torch.logspace(-1, 1, m)[:, None]).to(dtype)
    values, scale = row_wise(x)
    assert values.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.equal(values, torch.stack([equation_1(row.float()) for row in x]))
    columns, scales = column_wise(x)
    assert torch.equal(columns, row_wise(x.mT.contiguous())[0].mT) and scales.shape == (n,)
    whole, one = tensor_wise(x)
    assert torch.equal(whole, equation_1(x.float()))
    assert torch.equal(tensor_wise_transposed(x)[0], whole.mT) and torch.equal(tensor_wise_transposed(x)[1], one)
    for found, step in ((dequantize(values, scale), scale[:, None]), (dequantize(whole, one), one)):
        assert ((found - x.float()).abs() <= 0.5001 * step).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(-149, 127), st.integers(0, 2**31))
def test_rows_of_any_magnitude_come_back(exponent, seed):
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1) * 2.0**exponent
    x[1] = 0
    values, scale = row_wise(x)
    assert scale.isfinite().all() and (scale > 0).all() and (values > -128).all()
    assert not values[1].any()
    assert ((dequantize(values, scale) - x).abs() <= 0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_hidden(wrong):
    x = torch.randn(3, 8)
    x[1, 2] = wrong
    assert row_wise(x)[1].isfinite().tolist() == [True, False, True]
    assert not tensor_wise(x)[1].isfinite()
