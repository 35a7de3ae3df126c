"""Sparse attention against the dense mask: output and gradients, every kind, odd sizes."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from limner.layers import sparse
from limner.layers.attention import attend, visible
from limner.layers.sparse import SparseAttention

KINDS = ["row", "column", "conv", "dense"]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    prefix=st.integers(1, 7),
    kernel=st.sampled_from([1, 3, 5, 11]),
    queries=st.sampled_from([1, 8, 64]),
    weights=st.sampled_from([1, 1 << 22]),
    seed=st.integers(0, 999),
)
def test_it_equals_the_dense_mask(kind, grid, prefix, kernel, queries, weights, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "_QUERIES", queries)
        patch.setattr(sparse, "_WEIGHTS", weights)
        mask = visible(kind, prefix, grid, kernel)
        generator = torch.Generator().manual_seed(seed)
        fast = [torch.randn(2, 3, len(mask), 8, generator=generator).requires_grad_() for _ in range(3)]
        readable = [x.detach().clone().requires_grad_() for x in fast]
        y, expected = SparseAttention(kind, prefix, grid, kernel)(*fast), attend(*readable, mask)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
        upstream = torch.randn(y.shape, generator=generator)
        y.backward(upstream)
        expected.backward(upstream)
        for a, b in zip(fast, readable, strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)
