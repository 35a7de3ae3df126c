"""Properties that follow from a pattern's offsets."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from limner.attention.attention import attention_mask
from limner.attention.patterns import PATTERNS, Pattern, column, paper_pattern
from more_patterns import ALL, alternate, dilated


@settings(max_examples=80, deadline=None)
@given(
    make=st.sampled_from(list(ALL.values())), grid=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    kernel=st.sampled_from([1, 3, 11]),
)  # fmt: skip
def test_lines_and_rings_are_those_of_the_mask(make, grid, kernel):
    pattern, (h, w) = make(grid, kernel), grid
    mask = attention_mask(pattern, 0)
    for at in range(h * w):
        seen = set(mask[at].nonzero().flatten().tolist())
        line = range(at, -1, -pattern.num_lanes)[: pattern.ring_size()]
        assert seen <= set(line)
        assert len(pattern.offsets) < pattern.ring_size() or seen == set(line)
    assert pattern.cache_slots() == pattern.num_lanes * pattern.ring_size() <= h * w


def test_lines_are_columns_only_where_no_position_sees_another_column():
    assert [name for name, make in ALL.items() if make((6, 6), 3).by_column] == ["column", "alternate"]
    assert not column((1, 6)).by_column  # one row: each sees itself alone
    assert column((1, 6)).cache_slots() == 1


def test_holes_of_each():
    made = {name: ALL[name]((6, 6), 3) for name in ("row", "conv", "column", "dense", "dilated", "alternate")}
    assert [name for name, p in made.items() if len(p.offsets) < p.ring_size()] == ["conv", "dilated", "alternate"]
    assert (dilated((6, 6)).cache_slots(), alternate((6, 6)).cache_slots()) == (13, 30)


def test_the_papers_model_holds_283_positions_a_layer():
    held = {name: PATTERNS[name]((32, 32), 11).cache_slots() for name in ("row", "conv", "column")}
    assert held == {"row": 33, "conv": 166, "column": 1024}
    assert sum(held[name] for name in paper_pattern(64)) / 64 == pytest.approx(283, abs=0.5)


@pytest.mark.parametrize("offsets", [[], [1, 2], [-1, 0]])
def test_a_position_sees_itself_and_none_after_it(offsets):
    with pytest.raises(ValueError, match="must be 0, the position itself"):
        Pattern.from_offsets("strange", (4, 4), offsets)


def test_a_pattern_is_a_value():
    assert len({make((4, 4), 3) for make in (*ALL.values(), *ALL.values())}) == len(ALL)
    back = torch.tensor([-1, 0, 1, 2, 8, 9, 99])
    assert back[dilated((4, 4)).allows(back)].tolist() == [0, 2, 8]
