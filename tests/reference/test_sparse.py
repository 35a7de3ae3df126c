"""Sparse attention against the dense mask: output and gradients, every pattern, odd sizes."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from compare import assert_same_with_gradients
from limner.attention import sparse
from limner.attention.attention import attend, attention_mask
from limner.attention.sparse import SparseAttention
from limner.models.transformer import TransformerConfig
from more_patterns import ALL

SPARSE = sorted(ALL.keys() - {"dense"})


@settings(max_examples=60, deadline=None)
@given(
    make=st.sampled_from(list(ALL.values())),
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    prefix=st.integers(1, 7),
    kernel=st.sampled_from([1, 3, 5, 11]),
    queries=st.sampled_from([1, 8, 64]),
    weights=st.sampled_from([1, 1 << 22]),
    seed=st.integers(0, 999),
)
def test_sparse_attention_equals_the_dense_mask(make, grid, prefix, kernel, queries, weights, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "MIN_QUERIES", queries)
        patch.setattr(sparse, "CPU_WEIGHTS_PER_PART", weights)
        pattern = make(grid, kernel)
        mask, fast = attention_mask(pattern, prefix), SparseAttention(pattern, prefix)
        assert_same_with_gradients(fast, lambda q, k, v: attend(q, k, v, mask), (2, 3, len(mask), 8), seed)


@pytest.mark.parametrize("kind", SPARSE)
def test_errors_in_bf16_are_those_of_the_dense_mask(kind):
    torch.manual_seed(0)
    pattern = ALL[kind]((8, 6), 5)
    mask, fast = attention_mask(pattern, 5), SparseAttention(pattern, 5)
    q, k, v = (torch.randn(2, 3, len(mask), 16) for _ in range(3))
    exact = attend(q, k, v, mask)
    half = [x.bfloat16() for x in (q, k, v)]
    error, usual = ((path - exact).abs().max() for path in (fast(*half), attend(*half, mask)))
    assert fast(*half).dtype == torch.bfloat16
    assert error < 2 * usual < 0.1


@pytest.mark.parametrize("kind", SPARSE)
def test_scores_are_not_rounded_to_16_bits(kind):
    torch.manual_seed(0)
    fast, n = SparseAttention(ALL[kind]((8, 6), 5), 5), 5 + 48
    q, k, v = (16 * torch.randn(2, 3, n, 16).bfloat16() for _ in range(3))  # scores of hundreds: steps of 1 in bf16
    exact = fast(q.float(), k.float(), v.float())
    assert (fast(q, k, v) - exact).norm() < 0.005 * exact.norm()


@pytest.mark.slow
@pytest.mark.usefixtures("shapes_unchecked")
def test_one_compiled_graph_gives_the_same_loss_and_gradients(monkeypatch):
    monkeypatch.setattr(sparse, "DENSE_MAX_POSITIONS", 0)  # sparse at any size
    torch.manual_seed(0)
    config = TransformerConfig(
        text_vocab=40, image_vocab=30, text_len=5, grid=(6, 4), width=32, depth=4, heads=2, kernel=3
    )
    model = config.build()
    text, image = torch.randint(0, 40, (2, 5)), torch.randint(0, 30, (2, 24))

    def run(forward):
        model.zero_grad()
        loss = sum(logits.square().mean() for logits in forward(text, image))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    for got, want in zip(run(torch.compile(model, backend="aot_eager", fullgraph=True)), run(model), strict=True):
        torch.testing.assert_close(got, want)
