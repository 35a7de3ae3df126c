"""The masks of Figure 11, against a loop over what its caption says."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from compare import assert_same_with_gradients
from limner.attention import sparse
from limner.attention.attention import attend, attention_mask
from limner.attention.patterns import PATTERNS, conv, paper_pattern, row
from limner.attention.sparse import DenseAttention
from more_patterns import ALL


def sees(kind: str, back: int, width: int, kernel: int) -> bool:
    """Return whether an image position sees the one `back` raster steps before it."""
    if kind == "row":
        return back <= width
    if kind == "column":
        return back % width == 0
    if kind == "conv":
        half = kernel // 2
        return any(back == up * width + across for up in range(half + 1) for across in range(-half, half + 1))
    return True


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["row", "column", "conv", "dense"]),
    grid=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    prefix=st.integers(0, 5),
    kernel=st.sampled_from([1, 3, 5, 11]),
)
def test_mask_is_figure_11(kind, grid, prefix, kernel):
    mask = attention_mask(PATTERNS[kind](grid, kernel), prefix)
    n = prefix + grid[0] * grid[1]
    assert mask.shape == (n, n)
    for i in range(n):
        for j in range(n):
            if j > i:
                expected = False  # causal
            elif j < prefix or i < prefix:
                expected = True  # all text is seen
            else:
                expected = sees(kind, i - j, grid[1], kernel)
            assert bool(mask[i, j]) == expected, (i, j)


def test_row_mask_of_the_figure_sees_itself_and_four_before_on_a_4x4_grid():
    image = attention_mask(row((4, 4)), 6)[6:, 6:]
    assert image.sum(1).tolist() == [1, 2, 3, 4] + [5] * 12


def test_convolution_of_the_paper_sees_61_image_positions():
    assert int(attention_mask(conv((32, 32)), 0).sum(1).max()) == 5 * 11 + 6


def test_layer_pattern_of_the_paper():
    pattern = paper_pattern(64)
    assert pattern[:8] == ("row", "column", "row", "row", "row", "column", "row", "row")
    assert pattern[-1] == "conv"
    assert (pattern.count("row"), pattern.count("column"), pattern.count("conv")) == (47, 16, 1)


@settings(max_examples=25, deadline=None)
@given(make=st.sampled_from(list(ALL.values())), prefix=st.integers(1, 5), seed=st.integers(0, 99))
@pytest.mark.parametrize("written_out", [0, 512**2])
def test_either_way_of_masked_attention_equals_the_reference(written_out, make, prefix, seed):
    mask = attention_mask(make((3, 4), 3), prefix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "EXPLICIT_MAX_MASK", written_out)  # torch's kernel, or the products written out
        assert_same_with_gradients(
            DenseAttention(mask), lambda q, k, v: attend(q, k, v, mask), (2, 3, len(mask), 8), seed
        )


def test_the_reference_is_torchs_attention():
    torch.manual_seed(0)
    mask = attention_mask(conv((3, 4), 3), 2)
    q, k, v = (torch.randn(2, 3, 14, 8) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(attend(q, k, v, mask), expected)
