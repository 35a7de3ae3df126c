"""Integer products are exact with every kernel, float8 products close, and the kernel's name is recorded."""

import copy
import pickle
from itertools import pairwise, product

import pytest
import torch

from limner import compat
from limner.quantization import products
from limner.quantization.products import KernelCounter, counts_from_json, counts_to_json
from limner.quantization.quantize import E4M3, E5M2, dequantize, quantize


def integers(m, k, seed):
    return torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (300, 70, 33), (0, 4, 8), (90, 9_000, 40)])
def test_a_product_is_that_of_the_numbers_scaled_back(m, n, k, by_row, by_column, dtype):
    a, b, bias = integers(m, k, 1), integers(n, k, 2), torch.randn(n)
    scale_a, scale_b = torch.rand(m if by_row else ()) + 0.1, torch.rand(n if by_column else ()) + 0.1
    expected = dequantize(a, scale_a).double() @ dequantize(b, scale_b).double().mT + bias
    for right in (b, b.mT.contiguous().mT):
        found = products.product(a, right, scale_a, scale_b, bias, dtype)
        assert found.dtype == dtype
        tolerance = {"rtol": 1e-5, "atol": 1e-2} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1}
        torch.testing.assert_close(found, expected.to(dtype), **tolerance)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 5, 131), (64, 300, 1_000)])
def test_the_fast_product_is_exact(m, n, k):
    a, b = integers(m, k, 1), integers(n, k, 2)
    a[0], b[0] = 127, -127
    ones = torch.ones(())
    expected = (a.long()[:, None] * b.long()).sum(-1)
    assert torch.equal(products.reference(a, b), expected.double())
    assert products.select_kernel(a, b) == ("_int_mm", "")
    assert torch.equal(products.product(a, b, ones, ones), expected.float())
    assert torch.equal(torch._int_mm(a, b.mT), expected.int())


def layouts(x):
    """x by rows, by columns, spread out, and with every stride of a side of 1 from 0 to 5."""
    (m, k), strides = x.shape, {(x.shape[1], 1), (1, x.shape[0]), (x.shape[1] + 2, 1), (1, x.shape[0] + 2), (12, 3)}
    if m == 1:
        strides |= set(product(range(6), (1, 2)))
    if k == 1:
        strides |= set(product((1, 2), range(6)))
    for row, column in strides:
        memory = torch.zeros((m - 1) * row + (k - 1) * column + 1, dtype=x.dtype)
        yield memory.as_strided((m, k), (row, column)).copy_(x)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_small_products_are_exact_for_all_strides(m):
    """oneDNN refuses some strides of a side of 1, and torch then returns uninitialized memory."""
    ones = torch.ones(())
    for n, k in product((1, 2, 3, 4), repeat=2):
        a, b = integers(m, k, 1), integers(n, k, 2)
        expected = products.reference(a, b)
        for left, right in product(layouts(a), layouts(b)):
            assert products.select_kernel(left, right) == ("_int_mm", "")
            found = products.int32_sums(left, right, torch.full((m, n), 2**31 - 1, dtype=torch.int32))
            assert torch.equal(found.double(), expected), (left.stride(), right.stride())
            assert torch.equal(products.product(left, right, ones, ones), expected.float())
    same = torch.tensor([[5]], dtype=torch.int8).expand(m, 3)  # rows that are one in memory
    assert products.int32_sums(same, same).eq(75).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_a_matrix_by_rows_has_the_strides_of_one(shape):
    x = integers(*shape, 1)
    for y in layouts(x):
        found = products.row_major(y)
        assert found.stride() == (shape[1], 1) and torch.equal(found, x)
    assert products.row_major(found) is found


def test_a_product_that_does_not_fit_goes_to_the_reference_and_is_counted():
    counter = KernelCounter()
    a = torch.full((1, 140_000), 127, dtype=torch.int8)  # the sum is above 2^31
    ones = torch.ones(())
    found = products.product(a, a, ones, ones, counter=counter.id, role="weight gradient")
    assert found.item() == pytest.approx(140_000 * 127**2, rel=1e-7)
    ((key, times),) = counter.counts.items()
    assert key[:2] == ("weight gradient", "reference") and "32 bits" in key[2] and times == 1


def saturates(a, b, out=None):
    """Compute as CPUs without VNNI, which add pairs of unsigned times signed numbers in 16 bits."""
    pairs = ((a.int() + 128)[:, :, None] * b.int()).unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
    return pairs.sum(1) - 128 * b.int().sum(0)


def leaves_columns(a, b, out=None):
    """Compute as torch where oneDNN refuses strides."""
    out = torch.zeros(len(a), b.shape[1], dtype=torch.int32) if out is None else out
    return out if min(*a.shape, *b.shape) == 1 else out.copy_(products.reference(a, b.mT))


@pytest.mark.parametrize("kernel", [saturates, leaves_columns])
def test_a_processor_that_is_not_exact_is_found_out(monkeypatch, kernel):
    assert products.is_exact(torch.device("cpu"))
    monkeypatch.setattr(compat, "int_mm", kernel)
    products.is_exact.cache_clear()
    try:
        a, b, ones = integers(4, 8, 1), integers(5, 8, 2), torch.ones(())
        counter = KernelCounter()
        found = products.product(a, b, ones, ones, counter=counter.id)
        assert torch.equal(found, products.reference(a, b).float())
        assert list(counter.counts) == [("forward", "reference", "_int_mm is not exact on this device")]
    finally:
        products.is_exact.cache_clear()


def test_nonfinite_values_stay_nonfinite():
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    for wrong in (torch.inf, torch.nan):
        x[1, 3] = wrong
        (a, scale_a), (b, scale_b) = quantize(x, by_row=True), quantize(w, by_row=False)
        y = products.product(a, b, scale_a, scale_b)
        assert y[[0, 2]].isfinite().all() and not y[1].isfinite().any()


def test_error_grows_with_the_terms_summed_as_equation_12_says():
    """Var <u^, v^> = Var <u, v> + k s_q^2 (s_u^2 + s_v^2 + s_q^2), with s_q^2 the variance of one rounding error."""
    torch.manual_seed(0)
    rows, measured = 256, []
    for k in (64, 256, 1_024, 4_096):
        u, v = torch.rand(rows, k) * 2 - 1, torch.rand(rows, k) * 2 - 1
        u[:, 0] = v[:, 0] = 1  # so that scales, hence s_q, are the same for all k
        (a, scale_a), (b, scale_b) = quantize(u, by_row=True), quantize(v, by_row=True)
        error = (products.product(a, b, scale_a, scale_b).double() - u.double() @ v.double().mT).var().item()
        s_q, s_u, s_v = 1 / 127**2 / 12, 1 / 3, 1 / 3
        measured.append(error)
        assert error == pytest.approx(k * s_q * (s_u + s_v + s_q), rel=0.05)
    for smaller, larger in pairwise(measured):
        assert larger / smaller == pytest.approx(4, rel=0.1)


def test_a_copy_counts_for_itself():
    counter, one = KernelCounter(), torch.ones(1, 1, dtype=torch.int8)
    for other in (copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))):
        products.product(one, one, torch.ones(()), torch.ones(()), counter=other.id)
        assert other.counts.total() == 1 and counter.counts.total() == 0
        assert counts_from_json(counts_to_json(other.counts)) == other.counts


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 7), (300, 72, 40), (65, 33, 130)])
def test_a_gpu_gives_the_numbers_of_a_cpu(m, n, k):
    x, w = torch.randn(m, k), torch.randn(n, k)
    parts = (*quantize(x, by_row=True), *quantize(w, by_row=False))
    on_gpu = (*quantize(x.cuda(), by_row=True), *quantize(w.cuda(), by_row=False))
    assert all(torch.equal(found.cpu(), expected) for found, expected in zip(on_gpu, parts, strict=True))
    (a, s, b, t), (ga, gs, gb, gt) = parts, on_gpu
    torch.testing.assert_close(
        products.product(ga, gb, gs, gt).cpu(), products.product(a, b, s, t), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 3, 7), (40, 64, 32)])
@pytest.mark.parametrize("by_row", [False, True])
def test_the_simulated_product_is_that_of_the_numbers(m, n, k, by_row):
    torch.manual_seed(0)
    a, b = torch.randn(m, k).to(E5M2), torch.randn(n, k).to(E4M3)
    scale_a, scale_b, bias = torch.rand(m if by_row else ()), torch.rand(()), torch.randn(n)
    by = scale_a[:, None] if by_row else scale_a
    expected = by.double() * scale_b * (a.double() @ b.double().mT) + bias
    found = products.product(a, b, scale_a, scale_b, bias)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("m", [1, 2])
def test_a_gpu_gets_contiguous_rows_for_all_strides_of_a_side_of_1(monkeypatch, m, by_row):
    def scaled(a, b, scale_a, scale_b, out_dtype):
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, len(b))
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(products, "select_kernel", lambda a, b: ("_scaled_mm", ""))
    monkeypatch.setattr(compat, "scaled_mm", scaled)
    torch.manual_seed(0)
    a, b = torch.randn(32, m).to(E5M2), torch.randn(32, 16).to(E4M3)
    scale_a, scale_b = torch.rand(m if by_row else ()), torch.rand(())
    expected = (scale_a[:, None] if by_row else scale_a) * scale_b * (a.float().mT @ b.float())
    found = products.product(a.mT, b.mT, scale_a, scale_b)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
def test_the_gpus_product_is_the_simulated_one(by_row):
    a, b = torch.randn(64, 128, device="cuda"), torch.randn(48, 128, device="cuda")
    (x, s), (y, t) = quantize(a, by_row, E5M2), quantize(b, False, E4M3)
    if products.select_kernel(x, y)[0] == "simulated":
        pytest.skip(products.select_kernel(x, y)[1])
    found, expected = products.product(x, y, s, t), products.product(x.cpu(), y.cpu(), s.cpu(), t.cpu())
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
