"""The layout of a pipeline: which process holds and computes which part of a model.

    rank                 0        1        2        3          stages=2, replicas=2: rank = replica * stages + stage
    blocks            0 .. 3   4 .. 7   0 .. 3   4 .. 7        a model of 8 blocks
    share of a batch     0        0        1        1

The stages of a replica are a pipeline. With several `chunks` a stage holds as many pieces of the model, `stages` pieces
apart, which shortens the time that stages wait for each other (interleaved schedule; Narayanan et al. 2021).

A piece is a range of units. A unit is a trained block, which stays on one device: a cut therefore never divides a skip
connection, whose two branches would cross the link. The last unit also has the rest of the model (head), the first one
the embedding and the frozen blocks, as in PipeTransformer (He et al. 2021): the first stage computes their output
before the pipeline starts. As in the paper, the weight of a unit is its number of parameters, and a frozen parameter,
which has neither gradient nor moments nor stored activations, weighs `FROZEN_COST`.

All functions are pure: every process derives the parts of all processes from the layout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated

from torch import nn

from limner.blocks import leading_part
from limner.errors import UserError
from limner.validation import Range, Validated

__all__ = ["PipelineLayout", "parameter_stages", "partition", "unit_weights"]

MAX_MICROBATCHES_PER_STAGE = 6  # upper end of the paper's search for the number of micro-batches
FROZEN_COST = 1 / 6  # cost of a frozen parameter relative to a trained one (PipeTransformer, section 4.2)


@dataclass(frozen=True, kw_only=True)
class PipelineLayout(Validated):
    """Assignment of a model and of the shares of a batch to `stages` * `replicas` processes.

    Args:
        stages: K, processes of a pipeline.
        replicas: R, number of pipelines.
        frozen: leading blocks that do not train; above 0 the embedding does not train either.
        chunks: pieces of the model that each stage of several computes.
    """

    stages: Annotated[int, Range(1, 2**16)]
    replicas: Annotated[int, Range(1, 2**16)] = 1
    frozen: Annotated[int, Range(0, 2**16)] = 0
    chunks: Annotated[int, Range(1, 2**10)] = 1

    @property
    def world_size(self) -> int:
        return self.stages * self.replicas

    @property
    def pipelines(self) -> list[list[int]]:
        """Ranks of each pipeline, by stage."""
        return [[r * self.stages + s for s in range(self.stages)] for r in range(self.replicas)]

    def stage(self, rank: int) -> int:
        """Return the stage of a rank."""
        return rank % self.stages

    def replica(self, rank: int) -> int:
        """Return the pipeline of a rank, which is also its share of each batch."""
        return rank // self.stages

    @property
    def pieces(self) -> int:
        """Number of pieces of the model."""
        return self.stages * self.chunks if self.stages > 1 else 1

    def chunk_blocks(self, model: nn.Module) -> list[range]:
        """Return the trained blocks of each piece of a model with `embed` and `blocks`. Piece c belongs to stage c % K.
        Raises `UserError` if the trained blocks are too few."""
        weights, depth = unit_weights(model, self.frozen), len(leading_part(model, sys.maxsize)) - 1
        if len(weights) < self.pieces:
            raise UserError(
                f"{depth - self.frozen} trained blocks cannot be divided into {self.pieces} parts of a pipeline: "
                "choose fewer --pipeline-stages"
            )
        ends = [min(self.frozen + end, depth) for end in partition(weights, self.pieces)]
        return [range(a, b) for a, b in pairwise(ends)]

    def largest_stage(self, weights: Sequence[float]) -> float:
        """Return the weight of the largest stage of a model with these `unit_weights`."""
        pieces = [sum(weights[a:b]) for a, b in pairwise(partition(weights, self.pieces))]
        return max(sum(pieces[stage :: self.stages]) for stage in range(self.stages))

    def shortened(self, weights: Sequence[float], limit: float) -> PipelineLayout:
        """Return the layout after compression: K halves while the largest stage stays within the limit (Eq. 1), and
        while there are fewer units than pieces. An odd K becomes its largest divisor.

        Args:
            weights: `unit_weights` of the model with the frozen blocks of this layout.
            limit: weight of the largest stage before any block was frozen, which is known to fit into memory. The first
                unit may exceed it, with any K.
        """
        layout, limit = self, max(limit, weights[0])
        while layout.stages > 1:
            stages = max(k for k in range(1, layout.stages) if layout.stages % k == 0)
            shorter = replace(layout, stages=stages, replicas=self.world_size // stages)
            if len(weights) >= layout.pieces and shorter.largest_stage(weights) > limit:
                break
            layout = shorter
        return layout


def unit_weights(model: nn.Module, frozen: int) -> list[float]:
    """Return the weight of each unit of a model with `embed` and `blocks`, the first of which are frozen. If all blocks
    are, they and the head are one unit."""
    embed, *blocks = (sum(p.numel() for p in part.parameters()) for part in leading_part(model, sys.maxsize))
    head = sum(p.numel() for p in model.parameters()) - embed - sum(blocks)
    units: list[float] = [*blocks[frozen:]] or [0]
    units[0] += (embed + sum(blocks[:frozen])) * (FROZEN_COST if frozen else 1)
    units[-1] += head
    return units


def partition(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the boundaries (0, ..., n) of consecutive stages of which the largest weighs least.

    Each stage has at least one unit. Of several such partitions the one with the earliest cuts is returned. The paper
    divides greedily; this dynamic program finds the smallest possible maximum.

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


def parameter_stages(model: nn.Module, layout: PipelineLayout) -> dict[str, int]:
    """Return the stage of each parameter of a model with `embed` and `blocks`, by name."""
    block_stages = [0] * layout.frozen
    for piece, blocks in enumerate(layout.chunk_blocks(model)):
        block_stages += [piece % layout.stages] * len(blocks)

    def stage(name: str) -> int:
        part, *path = name.split(".")
        if part == "blocks":
            return block_stages[int(path[0])]
        return 0 if part == "embed" else layout.stages - 1

    return {name: stage(name) for name, _ in model.named_parameters()}
