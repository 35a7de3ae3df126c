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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import Any, Literal

import torch

from limner.data.stream import per_rank_batch_size
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.objectives.cross_entropy import LOGITS_PER_CHUNK
from limner.optim.dtensor import shard_dim
from limner.optim.optimizers import OptimizerConfig
from limner.planner.cost import Cost
from limner.quantization.precisions import Bf16Weights, Fp16Weights
from limner.training.config import TrainConfig

_FP32, _HALF, _CODE = 4, 2, 2  # bytes per value; codes have the format 1-6-9
Shape = tuple[int, ...]


@lru_cache(maxsize=16)
def parameter_shapes(config: TransformerConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the parameter shapes of a block and of the rest, by name."""
    with torch.device("meta"):
        model = config.build()
    block = {f"blocks.0.{name}": tuple(p.shape) for name, p in model.blocks[0].named_parameters()}
    return block, {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith("blocks.")}


Kind = Literal["fsdp", "zero2"]  # values of `--parallel`


@lru_cache(maxsize=16)
def moment_bytes(optimizer: OptimizerConfig) -> tuple[float, float, float]:
    """Measure the optimizer's bytes per value, for matrices of blocks, other tensors of blocks, and the rest, on a very
    small model after a step."""
    config = TransformerConfig(text_vocab=8, image_vocab=8, text_len=2, grid=(2, 2), width=16, depth=1, heads=1)
    model = config.build()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    built = optimizer.build(model)
    for part in built:
        part.step()
    states: dict[Any, Mapping[str, Any]] = {p: state for part in built for p, state in part.state.items()}
    sizes = []
    for group in (
        [p for p in model.blocks.parameters() if p.ndim == 2],
        [p for p in model.blocks.parameters() if p.ndim < 2],
        [p for name, p in model.named_parameters() if not name.startswith("blocks.")],
    ):
        values = [v for p in group for v in states[p].values() if isinstance(v, torch.Tensor) and v.shape == p.shape]
        sizes.append(sum(v.nbytes for v in values) / sum(p.numel() for p in group))
    return sizes[0], sizes[1], sizes[2]


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
        if rank > self.highest_rank:
            return f"a rank of {rank} exceeds the size of a matrix shard: choose at most {self.highest_rank}"
        return None

    @property
    def highest_rank(self) -> int:
        """Maximum rank of PowerSGD: P of the smallest shard is square."""
        return self.shards * min(min(self._shard_shape(shape)) for shape in self._matrices)

    @property
    def shards(self) -> int:
        return self.gpus // self.replicas

    @property
    def samples(self) -> int:
        """Samples of a GPU in a micro-batch."""
        return self.training.batch_size // self.gpus // self.training.accumulate

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
        vector_shapes = [s for name, s in block.items() if len(s) == 1 and not self.is_replicated(name)]
        matrices, vectors, outside = (
            sum(prod(self._shard_shape(shape)) for shape in shapes)
            for shapes in (self._matrices, vector_shapes, list(rest.values()))
        )
        return self.config.depth * matrices, self.config.depth * vectors, outside

    @cached_property
    def replicated_values(self) -> int:
        """Number of values replicated on each GPU: biases of linear layers with 16-bit weights."""
        biases = [shape for name, shape in parameter_shapes(self.config)[0].items() if self.is_replicated(name)]
        return self.config.depth * sum(map(prod, biases))

    @cached_property
    def linear_values(self) -> int:
        """Number of values of linear layers in the first GPU's shards of blocks."""
        block = parameter_shapes(self.config)[0]
        linear = [shape for name, shape in block.items() if self._is_linear(name) and not self.is_replicated(name)]
        return self.config.depth * sum(prod(self._shard_shape(shape)) for shape in linear)

    def is_replicated(self, name: str) -> bool:
        """Return True if the parameter is replicated on each GPU."""
        block = parameter_shapes(self.config)[0]
        return self.stores_16bit and name in block and self._is_linear(name) and len(block[name]) == 1

    def _is_linear(self, name: str) -> bool:
        return len(parameter_shapes(self.config)[0][f"{name.rpartition('.')[0]}.weight"]) == 2

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
        full: float = _FP32 * (sum(self.shard_values) + self.replicated_values)
        weights = full - self.stores_16bit * (_FP32 - _HALF) * matrices
        values = matrices, vectors + self.replicated_values, outside
        moments = sum(n * size for n, size in zip(values, moment_bytes(self.training.optimizer), strict=True))
        averaged = self.training.ema_decay is not None and not self.training.ema_on_cpu
        state = {"weights": weights, "gradients": weights, "moments": moments}
        if averaged:
            state["averaged weights"] = full
        if self.rank is not None:
            size = _HALF if self.stores_16bit else _FP32
            state["gradients"] -= size * matrices * (1 - 1 / self.config.depth)
            state |= {"error buffers": _CODE * matrices, "factors": _FP32 / _CODE * self.factor_bytes}
        return state

    @property
    def gathered_bytes(self) -> tuple[int, int]:
        """Bytes of an unsharded block and of the unsharded rest, with padding."""
        return self._block_bytes // self.config.depth * self.shards, self.shard_values[2] * self.shards * _FP32

    @property
    def retained_bytes(self) -> int:
        """Bytes of weights that stay gathered between the passes: the rest and the last block, with which the backward
        pass begins, or with zero2 all blocks."""
        block, rest = self.gathered_bytes
        return rest + block * (self.config.depth if self.kind == "zero2" else 1)

    @property
    def _block_bytes(self) -> int:
        """Bytes of the first GPU's shards of all blocks in the format of the all-gather."""
        return _FP32 * sum(self.shard_values[:2]) - self.gathers_16bit * (_FP32 - _HALF) * self.linear_values

    @property
    def _cost(self) -> Cost:
        """Cost of one GPU's micro-batch."""
        return Cost(config=self.config, gpus=1, batch=self.samples, device=self.device)

    @cached_property
    def activations(self) -> dict[str, float]:
        """Bytes that a micro-batch's forward pass leaves for the backward pass; for the head, its gradients."""
        stored, c = self._cost.activations(self.training.checkpoint_activations), self.config
        layers = {name: stored[name] for name in ("layers", "resblocks' inputs") if name in stored}
        if "layers" in layers:
            layers["layers"] -= self.gathers_16bit * c.depth * 12 * c.width**2 * _HALF  # no 16-bit copies
        head = (2 * self.samples * self._cost.positions + c.text_vocab + c.image_vocab) * c.width * _FP32
        return {**layers, "at the loss": head}

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
        unsharded = _FP32 * sum(self.shard_values[:2]) * self.shards  # all blocks in fp32
        if self.training.accumulate > 1:  # gradients of earlier micro-batches
            resident += unsharded + rest
        logits = 2 * _FP32 * min(LOGITS_PER_CHUNK, self.samples * self._cost.positions * self.config.text_vocab)
        workspace = self._workspace + max(last, min(2, self.config.depth) * block) + unsharded / self.config.depth
        loss = layers + head + logits + last
        return resident + max(loss, max(layers, gradients) + head + workspace, gradients + 2 * rest)

    @property
    def _workspace(self) -> float:
        """Temporary bytes of a block's backward pass, MLP first. With checkpointing each resblock is recomputed;
        otherwise the MLP frees its activations. Then attention has gradients of q, k, v and its output in 16 bits, of
        the identity path twice in 32, and the input of the MLP is freed."""
        cost, recomputes = self._cost, self.training.checkpoint_activations
        states = self.samples * cost.positions * self.config.width
        attention, mlp = map(max, zip(*map(cost.resblocks, set(self.config.patterns)), strict=True))
        gradients = (3 + 1) * _HALF * states + 2 * _FP32 * states
        after = gradients - _FP32 * states + cost.attention_workspace
        return max(mlp + cost.mlp_workspace, attention + after) if recomputes else max(cost.mlp_workspace, after - mlp)

    # ------------------------------------------------------------------ communication

    @cached_property
    def sent(self) -> dict[str, float]:
        """Bytes that a GPU sends in an update by collective, without scalars."""
        matrices, vectors, rest = self.shard_values
        blocks, parts = matrices + vectors, self.training.accumulate
        ring, gathered = self.shards - 1, self._gathered_blocks * self._block_bytes // self.config.depth + _FP32 * rest
        reduced = _FP32 * (vectors + rest) + self.factor_bytes if self.rank is not None else _FP32 * (blocks + rest)
        reduced += _FP32 * self.replicated_values
        return {
            "all-gather": ring * (parts * gathered + _FP32 * matrices * self._gathers_updates),
            "reduce-scatter": ring * _FP32 * (blocks + rest),
            "all-reduce": 2 * (self.replicas - 1) / self.replicas * reduced
            + 2 * (self.gpus - 1) / self.gpus * _FP32 * self.replicated_values,
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
            "all-reduce": (2 * depth + 2 if self.replicas > 1 else 0) + self.stores_16bit,
        }

    @property
    def uncompressed(self) -> Launch:
        """The launch without PowerSGD, which `dry_run.py` can run."""
        return replace(self, rank=None)

    @property
    def factor_bytes(self) -> int:
        """Bytes of P and Q of all matrices."""
        if self.rank is None:
            return 0
        shard_rank = self.rank // self.shards
        return _CODE * shard_rank * self.config.depth * sum(sum(self._shard_shape(shape)) for shape in self._matrices)

    @property
    def flops(self) -> float:
        """FLOPs of one GPU in an update. PowerSGD has three products with a factor per shard: E Q, E^T P and P Q^T."""
        total = Cost(config=self.config, gpus=self.gpus, batch=self.training.batch_size)
        compression = 6 * self.shard_values[0] * (self.rank or 0) // self.shards
        return total.flops(self.training.checkpoint_activations) / self.gpus + compression
