"""Triton's int8 kernels against torch's operations: on a GPU or, with TRITON_INTERPRET=1 set before Triton is imported,
in its interpreter. `test_triton.py` runs this file in a new process."""

import pytest
import torch
import triton

from limner.numerics.formats import INT8_MAX
from limner.quantization import triton_int8
from limner.quantization.products import product
from limner.quantization.quantize import quantize, scale_and_inverse

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
SHAPES = [(1, 1, 1), (3, 5, 7), (65, 33, 130), (64, 64, 64), (100, 70, 16)]  # m, n, k


def edge_cases(m, n, seed=0):
    """Random numbers, with a row of zeros, one of tiny numbers, one of huge numbers, and one of ties."""
    torch.manual_seed(seed)
    x = torch.randn(m, n) * torch.logspace(-3, 3, m)[:, None]
    x[0] = 0
    if m > 3:
        x[1], x[2] = x[1] * 1e-40, x[2] * 1e30
        x[3] = torch.arange(n) % 20 - 9.5
        x[3, 0] = 127
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [shape[:2] for shape in SHAPES])
def test_integers_and_scales_equal_those_of_torch(shape, dtype):
    x = edge_cases(*shape).to(dtype)
    for y in (x, x.mT):
        for result, expected in zip(triton_int8.row_wise(y.to(DEVICE)), quantize(y, by_row=True), strict=True):
            assert torch.equal(result.cpu(), expected)
    whole, _ = quantize(x, by_row=False)
    inverse = scale_and_inverse(x.abs().amax(), INT8_MAX)[1].to(DEVICE)
    assert torch.equal(triton_int8.quantize(x.to(DEVICE), inverse).cpu(), whole)
    transposed = triton_int8.quantize(x.to(DEVICE), inverse, transposed=True)
    assert transposed.is_contiguous() and torch.equal(transposed.cpu(), whole.mT)
    assert torch.equal(quantize(x, by_row=False, transpose=True)[0], transposed.cpu())


def test_a_value_that_is_not_finite_makes_its_row_not_finite():
    for wrong in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(4, 40, device=DEVICE)
        x[2, 17] = wrong
        values, scale = triton_int8.row_wise(x)
        assert scale.isfinite().tolist() == [True, True, False, True]
        ones = torch.ones(3, 40, dtype=torch.int8, device=DEVICE)
        y = triton_int8.product(values, ones, scale, torch.ones((), device=DEVICE), None, torch.float32)
        assert y.isfinite().all(1).tolist()[:2] == [True, True] and not y[2].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("by_row", "by_column", "bias"), [(1, 0, 0), (1, 1, 1), (0, 0, 1)])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_equal_the_reference(m, n, k, by_row, by_column, bias, dtype):
    torch.manual_seed(m)
    a, b = (torch.randint(-127, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
    scale_a, scale_b = torch.rand(m if by_row else ()), torch.rand(n if by_column else ())
    offset = torch.randn(n) if bias else None
    expected = product(a, b, scale_a, scale_b, offset, dtype)
    tolerance = {"rtol": 1e-6, "atol": 1e-4} if dtype == torch.float32 else {}
    a, b, scale_a, scale_b = (x.to(DEVICE) for x in (a, b, scale_a, scale_b))
    offset = None if offset is None else offset.to(DEVICE)
    for right in (b, b.mT.contiguous().mT):
        result = triton_int8.product(a, right, scale_a, scale_b, offset, dtype)
        torch.testing.assert_close(result.cpu(), expected, **tolerance)
