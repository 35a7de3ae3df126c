"""The partition into stages against all partitions, and the paper's criterion."""

import random
from itertools import combinations, pairwise

import pytest
import torch

from limner.distributed.pipeline_layout import FROZEN_COST
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.planner.pipeline_partition import largest_stage, partition, pipeline_length, unit_parameters

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
    heavier = [w + generator.random() for w in weights]
    assert largest_stage(heavier, 2 if n > 1 else 1) >= largest_stage(weights, 2 if n > 1 else 1)


def test_more_stages_than_units_are_an_error():
    for stages in (0, 4):
        with pytest.raises(UserError, match="3 units cannot be divided"):
            partition([1, 1, 1], stages)


def test_units_are_resblocks_in_the_models_order():
    config = TransformerConfig(text_vocab=8, image_vocab=8, text_len=2, grid=(2, 2), width=16, depth=2, heads=1)
    with torch.device("meta"):
        model = config.build()
    units = unit_parameters(model)
    assert list(units) == [
        "embed", "blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp", "head",
    ]  # fmt: skip
    assert sum(units.values()) == sum(p.numel() for p in model.parameters())


def test_the_papers_lengths_while_a_vit_freezes():
    """8, then 4, 2 and 1 GPUs per pipeline as frozen blocks leave it."""
    limit = largest_stage(VIT, 8)
    assert limit == pytest.approx(12.582, abs=0.001)  # 14.176 in the authors' greedy partition
    frozen = (0, 4, 7, 9, 10, 11, 12)
    active = [VIT[1 + 2 * blocks :] if blocks else VIT for blocks in frozen]
    for largest_at_start in (limit, 14.176):
        assert [pipeline_length(units, 8, largest_at_start) for units in active] == [8, 8, 4, 2, 2, 1, 1]
    # Frozen blocks that stay in the pipeline, with a sixth of their weight, keep it longer.
    staying = [[*(FROZEN_COST * n for n in VIT[: 1 + 2 * k]), *VIT[1 + 2 * k :]] for k in (4, 7, 9, 10)]
    assert [pipeline_length(units, 8, limit) for units in staying] == [8, 4, 4, 4]


@pytest.mark.parametrize("seed", range(30))
def test_compression_stops_at_the_first_length_whose_half_exceeds_the_limit(seed):
    generator = random.Random(seed)
    weights = [generator.random() for _ in range(generator.randint(1, 12))]
    limit = largest_stage(weights, 8) * generator.choice([0.5, 1, 2, 5])
    length = pipeline_length(weights, 8, limit)
    assert length in (1, 2, 4, 8)
    assert length == 1 or largest_stage(weights, length // 2) > limit
    assert all(largest_stage(weights, k) <= limit for k in (4, 2, 1) if k >= length and length < 8)
    # Fewer units never lengthen a pipeline.
    assert pipeline_length(weights[1:] or weights, 8, limit) <= length
