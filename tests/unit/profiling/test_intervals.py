import numpy as np
from hypothesis import given, strategies as st

from limner.profiling.intervals import difference, intersection, length, length_before, union

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def bitmap(pairs):
    bits = np.zeros(64, bool)
    for start, end in pairs:
        bits[start:end] = True
    return bits


@given(PAIRS)
def test_a_union_is_sorted_and_disjoint_and_covers_the_same_points(pairs):
    merged = union(pairs)
    assert (bitmap(merged) == bitmap(pairs)).all()
    assert (merged[:, 0] < merged[:, 1]).all()
    assert (merged[1:, 0] > merged[:-1, 1]).all()
    assert length(merged) == bitmap(pairs).sum()


@given(PAIRS, PAIRS)
def test_intersection_and_difference_equal_those_of_bitmaps_and_add_up(a, b):
    first, second = union(a), union(b)
    assert (bitmap(intersection(first, second)) == (bitmap(a) & bitmap(b))).all()
    assert (bitmap(difference(first, second)) == (bitmap(a) & ~bitmap(b))).all()
    assert length(intersection(first, second)) + length(difference(first, second)) == length(first)


@given(PAIRS, st.lists(st.integers(-3, 66)))
def test_the_length_before_a_time_equals_that_of_a_bitmap(pairs, times):
    expected = [bitmap(pairs)[: max(time, 0)].sum() for time in times]
    assert length_before(union(pairs), np.array(times, np.int64)).tolist() == expected


def test_nanoseconds_of_an_epoch_are_exact():
    start = 1_790_857_026_000_000_001
    assert length(union([(start, start + 1), (start + 1, start + 5)])) == 5
