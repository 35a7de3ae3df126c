"""A fast path against a readable one, output and gradients."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_same_with_gradients(
    fast: Callable[..., Tensor], readable: Callable[..., Tensor], shape: tuple[int, ...], seed: int
) -> None:
    """Both called with the same random q, k, v of `shape` and the same upstream gradient; to 1e-5."""
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    y, expected = fast(*ours), readable(*theirs)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(y.shape, generator=generator)
    y.backward(upstream)
    expected.backward(upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)
