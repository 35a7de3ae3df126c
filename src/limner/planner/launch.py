"""Memory and traffic per GPU of `torchrun … limner train --parallel fsdp` (or zero2), calculated before the start.

N GPUs hold R replicas of the weights, each in S = N / R shards (`distributed/sharded.py`). Weights, gradients, moments
and averages are sharded fp32; AdamW16's moments take 16 bits. If the precision stores the matrices of blocks and their
gradients in 16 bits, the biases of these layers are replicated on every GPU. A block is gathered for its forward and
its backward pass, its linear layers in 16 bits. The last block and the *rest*, all parameters outside the blocks, stay
gathered in between. The last of several micro-batches reduces gradients; until then they are unsharded on every GPU.

Bytes sent by a GPU in an update of A micro-batches, with ring collectives:

    all-gather       (S - 1) / S of the blocks twice (the last block and, with zero2, all blocks once) and of the rest
                     once, A times
    reduce-scatter   (S - 1) / S of all gradients
    all-reduce       2 (R - 1) / R of a shard; with PowerSGD of P and Q, and of all but the matrices of blocks

PowerSGD (App. E of Ramesh et al. 2021) takes each shard of a matrix, transposed if necessary, as m x n with m <= n, and
sends P [m, r / S] and Q [n, r / S] in 16 bits: the rank r is over all shards.

`dry_run.py` runs a launch in one process; tests compare its measurements with these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Literal

from limner.data.stream import per_rank_batch_size
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.optim.dtensor import shard_dim
from limner.planner.cost import (
    FP32,
    HALF,
    Cost,
    Shape,
    in_block,
    moment_bytes,
    parameter_kind,
    parameter_shapes,
    training_state,
)
from limner.quantization.precisions import Bf16Weights, Fp16Weights
from limner.training.config import TrainConfig

Kind = Literal["fsdp", "zero2"]  # values of `--parallel`


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A parallel layout for training a prior. Bytes are those of the first GPU, whose shards are the largest.

    Args:
        config: the model.
        training: batch, micro-batches, optimizer, averages, checkpointing.
        gpus: N.
        replicas: R.
        kind: value of `--parallel`; with zero2 blocks stay gathered between the passes.
        rank: r of PowerSGD between replicas; None sends uncompressed gradients.
        device: device type; on a CPU attention runs in smaller chunks.

    Raises `UserError` if the numbers are not divisible.
    """

    config: TransformerConfig
    training: TrainConfig
    gpus: int = 8
    replicas: int = 1
    kind: Kind = "fsdp"
    rank: int | None = None
    device: str = "cuda"

    def __post_init__(self) -> None:
        n, batch, parts = self.gpus, self.training.batch_size, self.training.accumulate
        if n % self.replicas:
            raise UserError(f"{n} processes cannot hold {self.replicas} replicas: choose a divisor of {n}")
        if (share := per_rank_batch_size(batch, n)) % parts:
            raise UserError(f"{share} samples per rank cannot be divided into {parts} micro-batches: choose a divisor")
        if self.rank is not None and (problem := self.rank_problem(self.rank)):
            raise UserError(problem)

    def rank_problem(self, rank: int) -> str | None:
        """Return why gradients cannot be compressed to a rank, or None if they can."""
        highest = self.shards * min(map(min, self._matrix_shards))  # P is square
        if self.replicas == 1:
            return f"a rank of {rank} needs at least two replicas: choose more replicas, or omit the rank"
        if rank % self.shards:
            return f"a rank of {rank} cannot be divided among {self.shards} shards: choose a multiple of {self.shards}"
        if rank > highest:
            return f"a rank of {rank} exceeds the size of a matrix shard: choose at most {highest}"
        return None

    # ------------------------------------------------------------------ parameters

    @property
    def shards(self) -> int:
        return self.gpus // self.replicas

    @property
    def samples(self) -> int:
        """Samples of a GPU in a micro-batch."""
        return self.training.batch_size // self.gpus // self.training.accumulate

    @property
    def _block(self) -> dict[str, Shape]:
        """Shapes of a block's parameters, by name."""
        return {name: shape for name, shape in parameter_shapes(self.config).items() if in_block(name)}

    @property
    def _matrix_shards(self) -> list[Shape]:
        """Padded shapes of the shards of a block's matrices."""
        return [self._shard_shape(shape) for shape in self._block.values() if len(shape) == 2]

    @property
    def stores_16bit(self) -> bool:
        """True if matrices of blocks and their gradients are stored in 16 bits."""
        return isinstance(self.training.precision, Fp16Weights | Bf16Weights)

    @property
    def gathers_16bit(self) -> bool:
        """True if linear layers are gathered in 16 bits; linear layers that train in 8 bits are gathered in fp32."""
        return self.stores_16bit or type(self.training.precision) in (Auto, Bf16, Fp16)

    @cached_property
    def _linear(self) -> list[str]:
        """Names of the parameters of a block's linear layers, whose weights are matrices."""
        return [name for name in self._block if len(self._block[f"{name.rpartition('.')[0]}.weight"]) == 2]

    @cached_property
    def replicated(self) -> list[str]:
        """Names of a block's parameters that are replicated on each GPU: biases of 16-bit linear layers."""
        return [name for name in self._linear if self.stores_16bit and len(self._block[name]) == 1]

    def _shard_shape(self, shape: Shape) -> Shape:
        """Return the padded shape of a parameter's shard."""
        dim = shard_dim(shape, self.shards)
        return *shape[:dim], ceil(shape[dim] / self.shards), *shape[dim + 1 :]

    @cached_property
    def _sharded(self) -> dict[str, Shape]:
        """Padded shapes of the shards, by name of a parameter that is sharded."""
        shapes = parameter_shapes(self.config)
        return {name: self._shard_shape(shape) for name, shape in shapes.items() if name not in self.replicated}

    @property
    def uneven(self) -> list[str]:
        """Names of the parameters that the number of shards does not divide, which are padded; blocks first."""
        full = parameter_shapes(self.config)
        names = [name for name, shard in self._sharded.items() if prod(shard) * self.shards != prod(full[name])]
        return sorted(names, key=in_block, reverse=True)

    @cached_property
    def shard_values(self) -> tuple[int, int, int]:
        """Numbers of values in the first GPU's padded shards: matrices of blocks, other tensors of blocks, the rest."""
        values = [0, 0, 0]
        for name, shard in self._sharded.items():
            values[parameter_kind(name, shard)] += prod(shard)
        return self.config.depth * values[0], self.config.depth * values[1], values[2]

    @cached_property
    def replicated_values(self) -> int:
        """Number of values replicated on each GPU."""
        return self.config.depth * sum(prod(self._block[name]) for name in self.replicated)

    # ------------------------------------------------------------------ memory

    @cached_property
    def state(self) -> dict[str, float]:
        """Bytes of weights, gradients, moments, averages, and PowerSGD's error buffers."""
        training, (matrices, vectors, rest) = self.training, self.shard_values
        values = matrices, vectors + self.replicated_values, rest
        averages = training.ema_decay is not None and not training.ema_on_cpu
        matrix_bytes = HALF if self.stores_16bit else FP32
        return training_state(values, matrix_bytes, moment_bytes(training.optimizer), averages, self.rank is not None)

    @cached_property
    def _block_bytes(self) -> int:
        """Bytes of the first GPU's shard of a block in the format of the all-gather."""
        linear = sum(prod(self._sharded[name]) for name in self._linear if name in self._sharded)
        return FP32 * sum(self.shard_values[:2]) // self.config.depth - self.gathers_16bit * (FP32 - HALF) * linear

    @property
    def gathered_bytes(self) -> tuple[int, int]:
        """Bytes of an unsharded block and of the unsharded rest, with padding."""
        return self._block_bytes * self.shards, self.shard_values[2] * self.shards * FP32

    @property
    def retained_bytes(self) -> int:
        """Bytes of weights that stay gathered between the passes: the rest and the last block, with which the backward
        pass begins, or with zero2 all blocks."""
        block, rest = self.gathered_bytes
        return rest + block * (self.config.depth if self.kind == "zero2" else 1)

    @property
    def _cost(self) -> Cost:
        """Cost of one GPU's micro-batch."""
        return Cost(config=self.config, samples=self.samples, device=self.device)

    @cached_property
    def activations(self) -> dict[str, float]:
        """Bytes that a micro-batch's forward pass leaves for the backward pass; for the head, its gradients."""
        c, cost = self.config, self._cost
        stored = cost.activations(self.training.checkpoint_activations, copies=not self.gathers_16bit)
        stored.pop("one layer recomputed", None)
        head = (2 * self.samples * cost.positions + c.text_vocab + c.image_vocab) * c.width * FP32
        return {**stored, "at the loss": head}

    @cached_property
    def peak(self) -> float:
        """Peak in bytes, the largest of three phases. The rest's weights are unsharded in all of them.

        - Loss: a chunk of logits and log-probabilities, all activations, the last block's weights.
        - A block's backward pass: its unsharded weights (with zero2 those of all blocks), the prefetched block, and its
          unsharded gradients. Gradient shards grow while activations are freed.
        - End: unsharded gradients of the rest, and a copy in the order of shards.
        """
        state, (block, rest) = dict(self.state), self.gathered_bytes
        last = self.retained_bytes - rest  # with zero2, all
        gradients, (layers, head) = state.pop("gradients"), self.activations.values()
        resident = sum(state.values()) + rest
        unsharded = FP32 * sum(self.shard_values[:2]) * self.shards  # all blocks in fp32
        if self.training.accumulate > 1:  # gradients of earlier micro-batches
            resident += unsharded + rest
        workspace = self._workspace + max(last, min(2, self.config.depth) * block) + unsharded / self.config.depth
        loss = layers + head + self._cost.logits(self.config.text_vocab) + last
        return resident + max(loss, max(layers, gradients) + head + workspace, gradients + 2 * rest)

    @property
    def _workspace(self) -> float:
        """Temporary bytes of a block's backward pass, MLP first, after recomputation with checkpointing. The MLP frees
        in 16 bits its hidden layer before and after GELU, its input and copies of its matrices, in 32 its LayerNorm's
        input. Then attention has gradients of q, k, v and its output in 16 bits, of the identity path twice in 32."""
        cost, d = self._cost, self.config.width
        states = self.samples * cost.positions * d
        recomputed = cost.activations(True)["one layer recomputed"] if self.training.checkpoint_activations else 0
        freed = (8 + 1) * 2 * states + FP32 * states + 8 * d * d * 2
        gradients = (3 + 1) * 2 * states + 2 * FP32 * states
        return max(recomputed + cost.mlp_workspace, recomputed - freed + gradients + cost.attention_workspace)

    # ------------------------------------------------------------------ communication

    @property
    def _gathered_blocks(self) -> int:
        """Number of block gathers per micro-batch: once with zero2, otherwise twice except for the last block."""
        return self.config.depth if self.kind == "zero2" else 2 * self.config.depth - 1

    @cached_property
    def sent(self) -> dict[str, float]:
        """Bytes that a GPU sends in an update by collective, without scalars."""
        matrices, vectors, rest = self.shard_values
        gathered = self.training.accumulate * (self._gathered_blocks * self._block_bytes + FP32 * rest)
        reduced = FP32 * (vectors + rest + self.replicated_values)
        reduced += FP32 * matrices if self.rank is None else self.factor_bytes
        return {
            "all-gather": (self.shards - 1) * (gathered + FP32 * matrices * self.training.optimizer.gathers_matrices),
            "reduce-scatter": (self.shards - 1) * FP32 * (matrices + vectors + rest),
            "all-reduce": 2 * (self.replicas - 1) / self.replicas * reduced
            + 2 * (self.gpus - 1) / self.gpus * FP32 * self.replicated_values,
        }

    @property
    def calls(self) -> dict[str, int]:
        """Calls of each collective in an update, for weights and uncompressed gradients."""
        depth, sharded, groups = self.config.depth, self.shards > 1, 1 + self.gathers_16bit  # groups of a block
        gathers = depth * len(self._matrix_shards) * self.training.optimizer.gathers_matrices
        return {
            "all-gather": sharded * (self.training.accumulate * (self._gathered_blocks * groups + 1) + gathers),
            "reduce-scatter": sharded * (depth * groups + 1),
            # Resblocks, embeddings, head; replicated values.
            "all-reduce": (2 * depth + 2 if self.replicas > 1 else 0) + self.stores_16bit,
        }

    @property
    def factor_bytes(self) -> int:
        """Bytes of P and Q of all matrices in 16 bits; 0 without PowerSGD."""
        return HALF * ((self.rank or 0) // self.shards) * self.config.depth * sum(map(sum, self._matrix_shards))

    @property
    def flops(self) -> float:
        """FLOPs of one GPU in an update. PowerSGD has three products with a factor per shard: E Q, E^T P and P Q^T."""
        batch = Cost(config=self.config, samples=self.training.batch_size)
        compression = 6 * self.shard_values[0] * (self.rank or 0) // self.shards
        return batch.flops(self.training.checkpoint_activations) / self.gpus + compression
