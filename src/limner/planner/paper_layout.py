"""Memory and traffic per GPU in the layout of Ramesh et al. 2021 (§2.4, §2.5, Figure 5, App. E), for any size and rank.

Each machine has a copy of the parameters, sharded over its `m` GPUs. Machines average gradients, optionally compressed
by PowerSGD to rank r. Each GPU has its own samples. A test compares the memory of one GPU with a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from limner.models.transformer import TransformerConfig
from limner.planner.cost import FP32, HALF, MATRICES, Cost, count_parameters, training_state


def default_rank(width: int) -> int:
    """Return the rank for a width: the paper's at its three widths (Table 1), proportional for other widths."""
    return max(128, 128 * ceil(0.225 * width / 128))


def compression_rate(width: int, rank: int, m: int = 8) -> float:
    """Return the share of traffic saved, 1 - r (m + 2) / (2 d m), which is 1 - 5 r / 8 d for m = 8 (App. E.1)."""
    return 1 - rank * (m + 2) / (2 * width * m)


def table1() -> list[tuple[int, int, int, float]]:
    """Return the rows of Table 1: effective parameters, width, rank, compression rate, for 64 layers."""
    return [(12 * 64 * d * d, d, r, compression_rate(d, r)) for d, r in ((1920, 512), (2688, 640), (3968, 896))]


def table2(d: int, r: int, m: int) -> dict[str, tuple[float, ...]]:
    """Return Table 2: numbers of values of a layer's gradient shard and of its factors P and Q, sent by one GPU."""
    rows: dict[str, tuple[float, ...]] = {
        "qkv and post-attention matrices": (4 * d * d / m, 4 * d * r / m, 4 * r / m * d / m),
        "first MLP matrix": (d * 4 * d / m, d * r / m, r / m * 4 * d / m),
        "second MLP matrix": (4 * d / m * d, 4 * d / m * r / m, r / m * d),
    }
    return {**rows, "total size": tuple(map(sum, zip(*rows.values(), strict=True)))}


@dataclass(frozen=True, kw_only=True)
class PaperLayout:
    """A number of machines in the paper's layout. Bytes are those of one GPU.

    Args:
        config: the model.
        gpus, per_machine: numbers of GPUs, in all and of a machine.
        batch: samples per step over all GPUs.
        rank: r of PowerSGD over all shards; None sends uncompressed gradients.
        half: the paper's storage (App. B.2, D), the precision `Fp16Weights` with `AdamW16`: the blocks' matrices, their
            gradients and both Adam moments in 16 bits, the rest in 32, averaged weights in host memory, and an error
            buffer for PowerSGD between machines. Otherwise everything is fp32, except for moments if `half_moments`.
        checkpointing: recompute activations.
    """

    config: TransformerConfig
    gpus: int = 8
    per_machine: int = 8
    batch: int = 64
    rank: int | None = None
    half: bool = False
    half_moments: bool = False
    checkpointing: bool = False

    @property
    def shards(self) -> int:
        """m, the GPUs over which a copy of the parameters is sharded."""
        return min(self.per_machine, self.gpus)

    @property
    def machines(self) -> int:
        return ceil(self.gpus / self.shards)

    @property
    def cost(self) -> Cost:
        """Cost of the largest number of samples on a GPU."""
        return Cost(config=self.config, samples=ceil(self.batch / self.gpus))

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Numbers of parameters in the blocks' matrices and elsewhere."""
        counts = count_parameters(self.config)
        matrices = sum(counts[kind] for kind in MATRICES)
        return matrices, counts.total() - matrices

    @property
    def state(self) -> dict[str, float]:
        """Bytes of weights, gradients, moments and averages, and of unsharded layers."""
        matrices, rest = (n / self.shards for n in self._sizes)
        moments = 2 * (HALF if self.half or self.half_moments else FP32), 2 * FP32, 2 * FP32
        state = training_state(
            (matrices, 0, rest), HALF if self.half else FP32, moments, not self.half, self.half and self.machines > 1
        )
        if self.shards > 1:  # the current layer and the prefetched next one (Figure 5)
            state["gathered layers"] = 2 * matrices * self.shards / self.config.depth * HALF
        return state

    @property
    def activations(self) -> dict[str, float]:
        """Bytes stored for the backward pass; for the head, a chunk of logits, gradients of its inputs and weights."""
        c, cost = self.config, self.cost
        vocab = max(c.text_vocab, c.image_vocab)
        gradients = (cost.samples * cost.positions + 2 * vocab) * c.width * FP32
        layers = cost.activations(self.checkpointing, copies=not self.half)
        return {**layers, "logits": cost.logits(vocab) + gradients}

    @property
    def workspace(self) -> float:
        """Peak of temporary bytes in one layer's backward pass, over both resblocks."""
        return self.cost.mlp_workspace + self.cost.attention_workspace

    @property
    def peak(self) -> float:
        """Peak in bytes. Gradients grow while activations are freed, so the larger of the two counts."""
        state = self.state
        gradients = state.pop("gradients")
        return sum(state.values()) + max(gradients, sum(self.activations.values())) + self.workspace

    @property
    def flops(self) -> float:
        """FLOPs of one GPU in a step, its share of the batch."""
        return Cost(config=self.config, samples=self.batch).flops(self.checkpointing) / self.gpus

    @property
    def memory_traffic(self) -> float:
        """Lower bound of the bytes that a GPU reads and writes: weights once per pass, state once per update,
        activations written and read."""
        gathered = sum(self._sizes) * HALF * (3 if self.checkpointing else 2)
        state = self.state
        update = 2 * (state["weights"] + state["moments"]) + state["gradients"]
        return gathered + update + 2 * sum(self.activations.values())

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a GPU sends by collective: two all-gathers of weights and a reduce-scatter of gradients in its
        machine, and a ring all-reduce of its gradient shard (Table 2) between machines."""
        m, (_, rest) = self.shards, self._sizes
        shard, p, q = table2(self.config.width, self.rank or 0, m)["total size"]
        matrices = self.config.depth * (shard if self.rank is None else p + q) * HALF
        once = (m - 1) / m * sum(self._sizes) * HALF
        reduced = matrices + rest / m * FP32  # the rest is never compressed
        return {
            "all-gather": 2 * once,
            "reduce-scatter": once,
            "all-reduce": 2 * (self.machines - 1) / self.machines * reduced,
        }
