"""Sparse attention against the dense mask: output and gradients, every kind, odd sizes."""

import pytest
from hypothesis import given, settings, strategies as st

from compare import assert_same_with_gradients
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
        fast = SparseAttention(kind, prefix, grid, kernel)
        assert_same_with_gradients(fast, lambda q, k, v: attend(q, k, v, mask), (2, 3, len(mask), 8), seed)
