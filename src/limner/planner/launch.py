"""Memory and traffic per GPU of `limner train` on one GPU, or on many with `torchrun` and `--parallel fsdp` or zero2.

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

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import Literal

from limner.data.stream import per_rank_batch_size
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.optim.dtensor import shard_dim
from limner.planner.activations import Activations
from limner.planner.cost import FP32, HALF, Shape, moment_bytes, parameter_shapes, training_flops
from limner.quantization.precisions import Bf16Weights, Fp16Weights
from limner.training.config import TrainConfig

Kind = Literal["fsdp", "zero2"]  # values of `--parallel`
_CODE = 2  # bytes per value in the format 1-6-9


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
        if self.replicas == 1:
            return f"a rank of {rank} needs at least two replicas: choose more replicas, or omit the rank"
        if rank % self.shards:
            return f"a rank of {rank} cannot be divided among {self.shards} shards: choose a multiple of {self.shards}"
        highest = self.shards * min(min(self._shard_shape(shape)) for shape in self._matrices)  # P is square
        if rank > highest:
            return f"a rank of {rank} exceeds the size of a matrix shard: choose at most {highest}"
        return None

    @property
    def shards(self) -> int:
        return self.gpus // self.replicas

    @property
    def _matrices(self) -> list[Shape]:
        return [shape for shape in parameter_shapes(self.config)[0].values() if len(shape) == 2]

    def _shard_shape(self, shape: Shape) -> Shape:
        """Return the padded shape of a parameter's shard."""
        dim = shard_dim(shape, self.shards)
        return *shape[:dim], ceil(shape[dim] / self.shards), *shape[dim + 1 :]

    @property
    def uneven(self) -> list[str]:
        """Names of the parameters that the number of shards does not divide, which are padded."""
        block, rest = parameter_shapes(self.config)
        sharded = {name: shape for name, shape in {**block, **rest}.items() if not self.is_replicated(name)}
        return [name for name, shape in sharded.items() if shape[shard_dim(shape, self.shards)] % self.shards]

    @cached_property
    def shard_values(self) -> tuple[int, int, int]:
        """Numbers of values in the first GPU's padded shards: matrices of blocks, other tensors of blocks, the rest."""
        block, rest = parameter_shapes(self.config)
        vectors = [shape for name, shape in block.items() if len(shape) == 1 and not self.is_replicated(name)]
        matrices, vectors, outside = (
            sum(prod(self._shard_shape(shape)) for shape in shapes)
            for shapes in (self._matrices, vectors, rest.values())
        )
        return self.config.depth * matrices, self.config.depth * vectors, outside

    @cached_property
    def replicated_values(self) -> int:
        """Number of values replicated on each GPU: biases of linear layers with 16-bit weights."""
        biases = [shape for name, shape in parameter_shapes(self.config)[0].items() if self.is_replicated(name)]
        return self.config.depth * sum(map(prod, biases))

    def is_replicated(self, name: str) -> bool:
        """Return True if the parameter is replicated on each GPU."""
        return self.stores_16bit and self._is_linear_bias(name)

    def _is_linear_bias(self, name: str) -> bool:
        block = parameter_shapes(self.config)[0]
        return name in block and name.endswith(".bias") and len(block[name.replace(".bias", ".weight")]) == 2

    @property
    def stores_16bit(self) -> bool:
        """True if matrices of blocks and their gradients are stored in 16 bits."""
        return isinstance(self.training.precision, Fp16Weights | Bf16Weights)

    @property
    def gathers_16bit(self) -> bool:
        """True if linear layers are gathered in 16 bits; linear layers that train in 8 bits are gathered in fp32."""
        return self.stores_16bit or type(self.training.precision) in (Auto, Bf16, Fp16)

    # ------------------------------------------------------------------ memory

    @cached_property
    def state(self) -> dict[str, float]:
        """Bytes of weights, gradients, moments, averages, and PowerSGD's error buffers and factors. With PowerSGD only
        one layer at a time has gradients of matrices (App. E.2, steps 2 and 11)."""
        matrices, vectors, outside = self.shard_values
        full: float = FP32 * (sum(self.shard_values) + self.replicated_values)
        weights = full - self.stores_16bit * (FP32 - HALF) * matrices
        values = matrices, vectors + self.replicated_values, outside
        moments = sum(n * size for n, size in zip(values, moment_bytes(self.training.optimizer), strict=True))
        state = {"weights": weights, "gradients": weights, "moments": moments}
        if self.training.ema_decay is not None and not self.training.ema_on_cpu:
            state["averaged weights"] = full
        if self.rank is not None:
            size = HALF if self.stores_16bit else FP32
            state["gradients"] -= size * matrices * (1 - 1 / self.config.depth)
            state |= {"error buffers": _CODE * matrices, "factors": FP32 / _CODE * self.factor_bytes}
        return state

    @property
    def _block_bytes(self) -> int:
        """Bytes of the first GPU's shard of a block in the format of the all-gather."""
        block = parameter_shapes(self.config)[0]
        biases = (
            0
            if self.stores_16bit
            else sum(prod(self._shard_shape(shape)) for name, shape in block.items() if self._is_linear_bias(name))
        )
        matrices, vectors = (n // self.config.depth for n in self.shard_values[:2])
        return FP32 * (matrices + vectors) - self.gathers_16bit * (FP32 - HALF) * (matrices + biases)

    @property
    def gathered_bytes(self) -> tuple[int, int]:
        """Bytes of an unsharded block and of the unsharded rest, with padding; 0 on a single GPU, which does not
        gather."""
        gathers = self.gpus > 1
        return gathers * self._block_bytes * self.shards, gathers * self.shard_values[2] * self.shards * FP32

    @property
    def retained_bytes(self) -> int:
        """Bytes of weights that stay gathered between the passes: the rest and the last block, with which the backward
        pass begins, or with zero2 all blocks."""
        block, rest = self.gathered_bytes
        return rest + block * (self.config.depth if self.kind == "zero2" else 1)

    @cached_property
    def activations(self) -> Activations:
        """Bytes of a micro-batch. On a single GPU linear layers copy weights to 16 bits; otherwise the gather does."""
        training = self.training
        return Activations(
            config=self.config, samples=training.batch_size // self.gpus // training.accumulate,
            copies=not (self.stores_16bit or (self.gathers_16bit and self.gpus > 1)),
            checkpointing=training.checkpoint_activations, device=self.device,
        )  # fmt: skip

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
        gradients, (layers, head) = state.pop("gradients"), self.activations.stored.values()
        resident = sum(state.values()) + rest
        unsharded = FP32 * sum(self.shard_values[:2]) * self.shards * (self.gpus > 1)  # gradients of all blocks
        if self.training.accumulate > 1:  # gradients of earlier micro-batches
            resident += unsharded + rest
        workspace = self.activations.workspace + max(last, min(2, self.config.depth) * block)
        workspace += unsharded / self.config.depth
        loss = layers + head + self.activations.logits + last
        return resident + max(loss, max(layers, gradients) + head + workspace, gradients + 2 * rest)

    @property
    def sizes(self) -> dict[str, float]:
        """Bytes of the state, of a micro-batch's activations, and at the peak."""
        return {
            **self.state, "activations of a micro-batch": sum(self.activations.stored.values()), "peak": self.peak
        }  # fmt: skip

    # ------------------------------------------------------------------ communication and arithmetic

    @cached_property
    def sent(self) -> dict[str, float]:
        """Bytes that a GPU sends in an update by collective, without scalars."""
        matrices, vectors, rest = self.shard_values
        blocks, ring = matrices + vectors, self.shards - 1
        gathered = self.training.accumulate * (self._gathered_blocks * self._block_bytes + FP32 * rest)
        reduced = FP32 * (vectors + rest) + self.factor_bytes if self.rank is not None else FP32 * (blocks + rest)
        replicated = FP32 * self.replicated_values
        return {
            "all-gather": ring * (gathered + FP32 * matrices * self._gathers_updates),
            "reduce-scatter": ring * FP32 * (blocks + rest),
            "all-reduce": 2 * (self.replicas - 1) / self.replicas * (reduced + replicated)
            + 2 * (self.gpus - 1) / self.gpus * replicated,
        }

    @property
    def _gathered_blocks(self) -> int:
        """Number of block gathers per micro-batch: once with zero2, otherwise twice except for the last block."""
        return self.config.depth if self.kind == "zero2" else 2 * self.config.depth - 1

    @property
    def _gathers_updates(self) -> bool:
        """True if the optimizer gathers the update of each matrix."""
        return self.training.optimizer.gathers_matrices and self.shards > 1

    @property
    def calls(self) -> dict[str, int]:
        """Calls of each collective in an update, for weights and uncompressed gradients."""
        depth, sharded, groups = self.config.depth, self.shards > 1, 1 + self.gathers_16bit  # groups of a block
        gathers = depth * len(self._matrices) * self._gathers_updates
        return {
            "all-gather": sharded * (self.training.accumulate * (self._gathered_blocks * groups + 1) + gathers),
            "reduce-scatter": sharded * (depth * groups + 1),
            # Resblocks, embeddings, head; replicated values.
            "all-reduce": (2 * depth + 2) * (self.replicas > 1) + (self.stores_16bit and self.gpus > 1),
        }

    @property
    def uncompressed(self) -> Launch:
        """The launch without PowerSGD, which `dry_run.py` can run."""
        return replace(self, rank=None)

    @property
    def factor_bytes(self) -> int:
        """Bytes of P and Q of all matrices."""
        shard_rank = (self.rank or 0) // self.shards
        return _CODE * shard_rank * self.config.depth * sum(sum(self._shard_shape(shape)) for shape in self._matrices)

    @property
    def flops(self) -> float:
        """FLOPs of one GPU in an update. PowerSGD has three products with a factor per shard: E Q, E^T P and P Q^T."""
        total = training_flops(self.config, self.training.batch_size, self.training.checkpoint_activations)
        return total / self.gpus + 6 * self.shard_values[0] * (self.rank or 0) // self.shards

    @property
    def memory_traffic(self) -> float:
        """Lower bound of the bytes that a GPU reads and writes in an update: 16-bit weights once per pass, activations
        written and read, state once."""
        values = sum(self.shard_values) * self.shards + self.replicated_values
        passes = 3 if self.training.checkpoint_activations else 2
        microbatch = passes * HALF * values + 2 * sum(self.activations.stored.values())
        update = 2 * (self.state["weights"] + self.state["moments"]) + self.state["gradients"]
        return self.training.accumulate * microbatch + update
