"""The partition into stages against all partitions, and the paper's criterion."""

import random
from itertools import combinations, pairwise

import pytest

from limner.distributed.pipeline_layout import FROZEN_COST, PipelineLayout, partition
from limner.errors import UserError

#: Millions of parameters of ViT-B/16 by unit, as its authors' log of 2020-12-30 prints them: embeddings, 12 times
#: attention and MLP, final norm, head of ImageNet.
VIT = [0.742656, *12 * (2.36390, 4.72396), 0.001536, 0.769]


def all_boundaries(units, stages):
    return [(0, *cuts, units) for cuts in combinations(range(1, units), stages - 1)]


def largest(weights, boundaries):
    return max(sum(weights[a:b]) for a, b in pairwise(boundaries))


@pytest.mark.parametrize("seed", range(100))
def test_the_partition_is_optimal_complete_and_monotone(seed):
    generator = random.Random(seed)
    n = generator.randint(1, 10)
    weights = [generator.choice([0, 1, 2, 5, generator.random()]) for _ in range(n)]
    maxima = []
    for stages in range(1, n + 1):
        boundaries = partition(weights, stages)
        assert (boundaries[0], boundaries[-1], len(boundaries)) == (0, n, stages + 1)
        assert all(a < b for a, b in pairwise(boundaries))  # each unit once, no empty stage
        best = min(largest(weights, other) for other in all_boundaries(n, stages))
        maxima.append(largest(weights, boundaries))
        assert maxima[-1] == pytest.approx(best)
    assert all(a >= b - 1e-12 for a, b in pairwise(maxima))  # no more with more stages
    layout, heavier = PipelineLayout(stages=min(n, 2)), [w + generator.random() for w in weights]
    assert layout.largest_stage(heavier) >= layout.largest_stage(weights)


def test_more_stages_than_units_are_an_error():
    for stages in (0, 4):
        with pytest.raises(UserError, match="3 units cannot be divided"):
            partition([1, 1, 1], stages)


def test_the_papers_lengths_while_a_vit_freezes():
    """8, then 4, 2 and 1 GPUs per pipeline as frozen blocks leave it."""
    layout = PipelineLayout(stages=8)
    limit = layout.largest_stage(VIT)
    assert limit == pytest.approx(12.582, abs=0.001)  # 14.176 in the authors' greedy partition
    frozen = (0, 4, 7, 9, 10, 11, 12)
    active = [VIT[1 + 2 * blocks :] if blocks else VIT for blocks in frozen]
    for largest_at_start in (limit, 14.176):
        assert [layout.shortened(units, largest_at_start).stages for units in active] == [8, 8, 4, 2, 2, 1, 1]
    # Frozen blocks that stay in the pipeline, with a sixth of their weight, keep it longer.
    weighted = ([sum(VIT[: 1 + 2 * n]) * FROZEN_COST + VIT[1 + 2 * n], *VIT[2 + 2 * n :]] for n in (4, 7, 9, 10))
    assert [layout.shortened(units, limit).stages for units in weighted] == [8, 4, 4, 2]


@pytest.mark.parametrize("seed", range(30))
def test_compression_stops_at_the_first_length_whose_half_exceeds_the_limit(seed):
    generator = random.Random(seed)
    weights = [generator.random() for _ in range(generator.randint(1, 12))]
    start = PipelineLayout(stages=8, replicas=2)
    limit = max(weights) * generator.choice([0.5, 1, 2, 5])
    layout = start.shortened(weights, limit)
    assert layout.stages in (1, 2, 4, 8)
    assert layout.world_size == 16
    assert len(weights) >= layout.stages
    half = PipelineLayout(stages=max(layout.stages // 2, 1))
    assert layout.stages == 1 or half.largest_stage(weights) > max(limit, weights[0])


@pytest.mark.parametrize("depth", [4, 12, 64])
def test_more_frozen_blocks_never_lengthen_a_pipeline(depth):
    start, blocks = PipelineLayout(stages=8), [1.0] * depth
    limit = start.largest_stage([*blocks, 2.0]) if depth > 7 else 2.0
    units = ([n * FROZEN_COST + 1, *blocks[n + 1 :], 2.0] for n in range(depth))
    lengths = [start.shortened(weights, limit).stages for weights in units]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] <= 2


def test_an_odd_number_of_stages_becomes_its_largest_divisor():
    layout = PipelineLayout(stages=9, replicas=2)
    assert [layout.shortened([1.0] * 9, limit).stages for limit in (1, 2, 3, 9)] == [9, 9, 3, 1]
    assert layout.shortened([1.0, 1.0], 0.0) == PipelineLayout(stages=1, replicas=18)


def test_pieces_of_one_stage_weigh_together():
    layout = PipelineLayout(stages=2, chunks=2)
    assert layout.largest_stage([1, 2, 3, 4]) == 6
    assert PipelineLayout(stages=1, chunks=2).largest_stage([1, 2, 3, 4]) == 10
