"""Sparse attention as one FlexAttention kernel: the mask on any machine, outputs and gradients on a GPU."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import flex_attention

from limner.attention import flex, patterns
from limner.attention.attention import attend, attention_mask
from limner.attention.patterns import Pattern
from limner.attention.sparse import SparseAttention
from more_patterns import ALL


@settings(max_examples=60, deadline=None)
@given(
    make=st.sampled_from(list(ALL.values())),
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    prefix=st.integers(1, 7),
    kernel=st.sampled_from([1, 3, 5, 11]),
)
def test_the_block_mask_equals_the_dense_mask(make, grid, prefix, kernel):
    pattern = make(grid, kernel)
    positions = torch.arange(prefix + grid[0] * grid[1])
    mask_mod = flex.mask_mod(pattern, prefix, torch.device("cpu"))
    seen = mask_mod(positions, positions, positions[:, None], positions[None, :])
    if pattern.by_column:
        image = flex.to_column_order(positions[prefix:, None], grid).flatten()
        order = torch.cat([positions[:prefix], image])
        seen = seen[order.argsort()][:, order.argsort()]
    assert torch.equal(seen, attention_mask(pattern, prefix))


@pytest.mark.parametrize("kind", sorted(ALL))
def test_uncompiled_flexattention_equals_the_dense_mask(kind, monkeypatch):
    """Uncompiled FlexAttention is torch's reference implementation. On a CPU it computes outputs only."""
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask))
    pattern = ALL[kind]((8, 6), 5)
    q, k, v = (torch.randn(2, 3, 5 + 48, 16) for _ in range(3))
    torch.testing.assert_close(flex.attend(pattern, 5, q, k, v), attend(q, k, v, attention_mask(pattern, 5)))


def test_runs_are_consecutive_offsets():
    grid = (32, 32)
    assert flex.runs(Pattern.from_offsets("odd", grid, (0, 1, 2, 5, 7, 8))) == [(0, 2), (5, 5), (7, 8)]
    assert flex.runs(patterns.row(grid)) == [(0, 32)] and flex.runs(patterns.column(grid)) == [(0, 31)]
    assert len(flex.runs(patterns.conv(grid))) == 6


def test_a_cpu_does_not_use_the_kernel():
    assert not flex.supports(patterns.row((8, 6)), torch.randn(1, 1, 53, 64))


def test_a_kernel_whose_scores_are_fp32_takes_no_float64(monkeypatch):
    monkeypatch.setattr(flex, "triton_supports", lambda x: True)
    q = torch.randn(1, 1, 53, 64)
    assert flex.supports(patterns.row((8, 6)), q) and not flex.supports(patterns.row((8, 6)), q.double())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(ALL))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_gpus_outputs_and_gradients_are_those_of_the_dense_mask(kind, dtype, tolerance):
    pattern, prefix = ALL[kind]((16, 12), 5), 9
    fast, mask = SparseAttention(pattern, prefix).cuda(), attention_mask(pattern, prefix).cuda()
    for rows in (3, 1, 2):  # without compiling the kernel again
        q, k, v, g = (torch.randn(rows, 3, prefix + 192, 64, device="cuda") for _ in range(4))
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        assert flex.supports(pattern, inputs[0]) == (kind != "dilated")
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected, output = attend(*exact, mask), fast(*inputs)
        grads = torch.autograd.grad(output, inputs, g.to(dtype))
        expected_grads = torch.autograd.grad(expected, exact, g.to(dtype).double())
        for ours, theirs in zip((output, *grads), (expected, *expected_grads), strict=True):
            assert ours.dtype == dtype
            assert (ours.double() - theirs).norm() < tolerance * theirs.norm()
        with torch.inference_mode():
            assert torch.equal(fast(*inputs), output)


@pytest.mark.gpu
def test_a_gpu_without_flexattention_uses_blocks(monkeypatch):
    def broken(*_):
        raise TypeError("no")

    pattern: Pattern = patterns.row((8, 6))
    q, k, v = (torch.randn(2, 3, 5 + 48, 16, device="cuda") for _ in range(3))
    broken.works = True
    monkeypatch.setattr(flex, "compiled_flex_attention", broken)
    with pytest.warns(UserWarning, match="FlexAttention failed"):
        output = SparseAttention(pattern, 5).cuda()(q, k, v)
    torch.testing.assert_close(output, attend(q, k, v, attention_mask(pattern, 5).cuda()), rtol=1e-4, atol=1e-4)
    assert not broken.works
