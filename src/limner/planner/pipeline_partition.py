"""Partition of a model into pipeline stages, and the length of the pipeline (PipeTransformer, He et al. 2021).

A unit is a part of the model that stays on one device: the embeddings, an attention or MLP resblock, the head. A cut
therefore never divides a skip connection, whose two branches would cross the link. The weight of a unit is its cost or,
as in the paper, its number of parameters. A frozen unit has neither gradients nor moments nor stored activations;
callers pass the weights of trained units.

The paper divides greedily; the dynamic program here finds the smallest possible maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from limner.blocks import resblocks
from limner.errors import UserError
from limner.models.transformer import Transformer


def unit_parameters(model: Transformer) -> dict[str, int]:
    """Return the number of parameters of each unit by name, in the model's order."""
    units = {"embed": model.embed, **resblocks(model), "head": model.head}
    return {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}


def partition(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the boundaries (0, ..., n) of consecutive stages of which the largest weighs least.

    Each stage has at least one unit. Of several such partitions the one with the earliest cuts is returned.

    Raises `UserError` with fewer units than stages.
    """
    if not 1 <= stages <= len(weights):
        raise UserError(f"{len(weights)} units cannot be divided into {stages} stages: choose 1 to {len(weights)}")
    sums = [0.0, *accumulate(weights)]
    # Smallest maximum, and boundaries, of the first `end` units in `stage` stages.
    best = {end: (sums[end], (0, end)) for end in range(1, len(sums))}
    for stage in range(2, stages + 1):
        best = {
            end: min((max(best[cut][0], sums[end] - sums[cut]), (*best[cut][1], end)) for cut in range(stage - 1, end))
            for end in range(stage, len(sums))
        }
    return best[len(weights)][1]


def largest_stage(weights: Sequence[float], stages: int) -> float:
    """Return the weight of the largest stage of the partition; stages beyond the number of units are empty."""
    return max(sum(weights[a:b]) for a, b in pairwise(partition(weights, min(stages, len(weights)))))


def pipeline_length(weights: Sequence[float], stages: int, limit: float) -> int:
    """Return the number of stages after compression: K halves while the largest stage stays within the limit (Eq. 1).

    Args:
        weights: of the units that are now in the pipeline.
        stages: K before, a power of two.
        limit: weight of the largest stage before any unit was frozen, which is known to fit into memory.
    """
    while stages > 1 and largest_stage(weights, stages // 2) <= limit:
        stages //= 2
    return stages
