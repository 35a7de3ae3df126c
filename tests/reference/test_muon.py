"""limner's Muon against torch's, which updates one matrix at a time."""

import pytest
import torch
from torch import nn

from limner.optim.muon import Muon, orthogonalize


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_equal_those_of_torch(weight_decay: float) -> None:
    torch.manual_seed(0)
    shapes = [(12, 4), (4, 12), (12, 4), (8, 8), (12, 4)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon(ours, lr=0.02, momentum=0.9, weight_decay=weight_decay)
    b = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=weight_decay)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        with torch.autocast("cpu", torch.bfloat16):  # torch's Muon always uses bf16
            a.step()
        b.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, atol=2e-3, rtol=0)  # torch rounds to bf16 before normalizing


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    for shape in [(3, 16, 16), (2, 40, 8), (2, 8, 40)]:
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)).float())
        assert float(values.min()) > 0.3 and float(values.max()) < 1.3


@pytest.mark.parametrize("decimals", [0, 1, 6])
@pytest.mark.parametrize("shape", [(12, 12), (12, 20), (12, 24), (12, 60), (60, 12), (1, 7)])
def test_orthogonalization_equals_five_newton_schulz_steps(shape, decimals) -> None:
    """For all shapes, also those that use the Gram matrix, and for singular values over many decimals."""
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(3, *shape, dtype=torch.float64), full_matrices=False)
    x = u * 10 ** torch.linspace(0, -decimals, min(shape), dtype=torch.float64) @ v
    expected = x / x.norm(dim=(1, 2), keepdim=True)
    for _ in range(5):
        gram = expected @ expected.mT
        expected = 3.4445 * expected - 4.775 * gram @ expected + 2.0315 * gram @ gram @ expected
    error = (orthogonalize(x.float()) - expected).norm() / expected.norm()
    assert error < (5e-6 if decimals < 2 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_updates_are_nearly_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 32, 64) * 1e-6  # fp16 would represent these with few digits
    exact = orthogonalize(matrices)
    with torch.autocast("cpu", dtype):
        half = orthogonalize(matrices)
    assert (exact.dtype, half.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(exact, half.float(), atol=0.02, rtol=0)


def test_vectors_are_rejected() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([nn.Parameter(torch.ones(3))])
