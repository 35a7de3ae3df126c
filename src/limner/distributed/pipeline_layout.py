"""The layout of a pipeline: which process holds and computes which part of a model.

    rank                 0        1        2        3          stages=2, replicas=2: rank = replica * stages + stage
    blocks            0 .. 3   4 .. 7   0 .. 3   4 .. 7        a model of 8 blocks
    share of a batch     0        0        1        1

The stages of a replica are a pipeline. The first stage also holds the embedding, the last one the rest of the model
(head). With several `chunks` a stage holds as many pieces of the model, `stages` pieces
apart, which shortens the time that stages wait for each other (interleaved schedule; Narayanan et al. 2021).

The embedding and the first `frozen` blocks may be frozen, as in PipeTransformer (He et al. 2021). They belong to the
first stage, which computes their output before the pipeline starts. All functions are pure: every process
derives the parts of all processes from the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from torch import nn

from limner.errors import UserError
from limner.validation import Range, Validated

__all__ = ["PipelineLayout", "parameter_stages"]

FROZEN_COST = 1 / 6  # cost of a frozen block relative to a trained one (PipeTransformer, section 4.2)


@dataclass(frozen=True, kw_only=True)
class PipelineLayout(Validated):
    """Assignment of a model and of the shares of a batch to `stages` * `replicas` processes.

    Args:
        stages: K, processes of a pipeline.
        replicas: R, number of pipelines.
        frozen: leading blocks that do not train; above 0 the embedding does not train either.
        chunks: pieces of the model that each stage computes.
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

    def chunk_blocks(self, depth: int) -> list[range]:
        """Return the trained blocks of each piece of a model with `depth` blocks. Piece c belongs to stage c % K.

        The pieces cost about the same, counting frozen blocks in the first one. Raises `UserError` if the
        trained blocks are too few.
        """
        pieces, trained = self.stages * self.chunks, depth - self.frozen
        if trained < pieces:
            raise UserError(
                f"{trained} trained blocks cannot be divided into {pieces} parts of a pipeline: choose fewer "
                "--pipeline-stages"
            )
        frozen_cost = FROZEN_COST * self.frozen
        first = min(max(round((trained + frozen_cost) / pieces - frozen_cost), 1), trained - pieces + 1)
        ends = [first + (trained - first) * i // max(pieces - 1, 1) for i in range(pieces)]
        return [range(self.frozen + a, self.frozen + b) for a, b in pairwise([0, *ends])]

    def block_stages(self, depth: int) -> list[int]:
        """Return the stage of each block."""
        stages = [0] * depth
        for piece, blocks in enumerate(self.chunk_blocks(depth)):
            for block in blocks:
                stages[block] = piece % self.stages
        return stages


def parameter_stages(model: nn.Module, layout: PipelineLayout) -> dict[str, int]:
    """Return the stage of each parameter of a model with `embed` and `blocks`, by name."""
    blocks: Any = model.blocks
    block_stages = layout.block_stages(len(blocks))

    def stage(name: str) -> int:
        part, *path = name.split(".")
        if part == "blocks":
            return block_stages[int(path[0])]
        return 0 if part == "embed" else layout.stages - 1

    return {name: stage(name) for name, _ in model.named_parameters()}
