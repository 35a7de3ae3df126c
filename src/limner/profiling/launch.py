"""What `torchrun … limner train --parallel sharded` (or zero2) takes of each GPU, calculated before it is started.

N GPUs hold R replicas of the weights, each in S = N / R shards (`distributed/sharded.py`). Weights, gradients, moments
and averages are fp32, sharded; AdamW16's moments take 16 bits. So do matrices of blocks and their gradients, if the
precision stores them so; the biases beside them are then whole on every GPU. A block is gathered for its forward and
its backward pass, its linear layers in 16 bits; the last block, and what is outside the blocks, the rest, stay gathered
in between. Of several micro-batches the last one reduces gradients: until then they stay whole on every GPU.

Sent by a GPU in an update of A micro-batches, going around a ring:

    all-gather       (S - 1) / S of the blocks twice (the last and, with zero2, all once) and of the rest once, A times
    reduce-scatter   (S - 1) / S of all gradients
    all-reduce       2 (R - 1) / R of a shard; with PowerSGD of P and Q, and of what is no matrix of a block

PowerSGD (App. E of Ramesh et al. 2021) takes each shard of a matrix, transposed if need be, as m x n with m <= n, and
sends P [m, r / S] and Q [n, r / S] in 16 bits: the rank r is over all shards together.

`dry_run.py` runs such a launch in one process; tests hold these figures against what it finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import Any, Literal

import torch

from limner.data.stream import share_of
from limner.errors import UserError
from limner.layers.cross_entropy import LOGITS
from limner.layers.precisions import Bf16Weights, Fp16Weights
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.optim.dtensor import shard_dim
from limner.optim.optimizers import OptimizerConfig
from limner.profiling.cost import Cost
from limner.training.config import TrainConfig

_FP32, _HALF, _CODE = 4, 2, 2  # bytes; codes are of 1-6-9
Shape = tuple[int, ...]


@lru_cache(maxsize=16)
def shapes(config: TransformerConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Of the parameters of a block, and of those outside the blocks, by name."""
    with torch.device("meta"):
        model = config.build()
    block = {f"blocks.0.{name}": tuple(p.shape) for name, p in model.blocks[0].named_parameters()}
    return block, {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith("blocks.")}


Kind = Literal["sharded", "zero2"]  # of `--parallel`


@lru_cache(maxsize=16)
def moment_bytes(optimizer: OptimizerConfig) -> tuple[float, float, float]:
    """Bytes of state that an optimiser keeps for a value of a matrix of a block, of another tensor of a block, and of
    what is outside: those of a very small model after a step."""
    config = TransformerConfig(text_vocab=8, image_vocab=8, text_len=2, grid=(2, 2), width=16, depth=1, heads=1)
    model = config.build()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    built = optimizer.build(model)
    for each in built:
        each.step()
    kept: dict[Any, Mapping[str, Any]] = {p: state for each in built for p, state in each.state.items()}
    found = []
    for some in (
        [p for p in model.blocks.parameters() if p.ndim == 2],
        [p for p in model.blocks.parameters() if p.ndim < 2],
        [p for name, p in model.named_parameters() if not name.startswith("blocks.")],
    ):
        values = [v for p in some for v in kept[p].values() if isinstance(v, torch.Tensor) and v.shape == p.shape]
        found.append(sum(v.nbytes for v in values) / sum(p.numel() for p in some))
    return found[0], found[1], found[2]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One way to start the training of a prior. Bytes are of one GPU, the first, whose shards are the largest.

    Args:
        config: the model.
        training: how it is trained: batch, micro-batches, optimiser, averages, checkpointing.
        gpus: N.
        replicas: R.
        kind: of `--parallel`; with zero2 blocks stay gathered between the passes.
        rank: r of PowerSGD between replicas; None sends gradients uncompressed.
        device: the type of device; attention works in smaller parts on a CPU.

    Raises `UserError` where numbers do not divide.
    """

    config: TransformerConfig
    training: TrainConfig
    gpus: int = 8
    replicas: int = 1
    kind: Kind = "sharded"
    rank: int | None = None
    device: str = "cuda"

    def __post_init__(self) -> None:
        n, batch, parts = self.gpus, self.training.batch_size, self.training.accumulate
        if n % self.replicas:
            raise UserError(f"{n} processes cannot hold {self.replicas} replicas: choose a divisor of {n}")
        if (share := share_of(batch, n)) % parts:
            raise UserError(
                f"the {share} samples of a rank cannot be divided into {parts} micro-batches: choose a divisor"
            )
        if self.rank is not None and (why := self.refuses(self.rank)):
            raise UserError(why)

    def refuses(self, rank: int) -> str | None:
        """Why gradients cannot be compressed to that rank; None if they can."""
        if self.replicas == 1:
            return f"a rank of {rank} is for gradients between replicas, and there is one: choose more, or no rank"
        if rank % self.shards:
            return f"a rank of {rank} cannot be divided among {self.shards} shards: choose a multiple of {self.shards}"
        if rank > self.highest_rank:
            return f"a rank of {rank} is more than shards of matrices have: choose at most {self.highest_rank}"
        return None

    @property
    def highest_rank(self) -> int:
        """Of PowerSGD: P has as many columns as rows, for the smallest shard."""
        return self.shards * min(min(self._shard(shape)) for shape in self._matrices)

    @property
    def shards(self) -> int:
        return self.gpus // self.replicas

    @property
    def samples(self) -> int:
        """Of a micro-batch."""
        return self.training.batch_size // self.gpus // self.training.accumulate

    @property
    def _matrices(self) -> list[Shape]:
        return [shape for shape in shapes(self.config)[0].values() if len(shape) == 2]

    def _shard(self, shape: Shape) -> Shape:
        """Of a parameter, with padding."""
        along = shard_dim(shape, self.shards)
        return *shape[:along], ceil(shape[along] / self.shards), *shape[along + 1 :]

    @property
    def uneven(self) -> list[str]:
        """Parameters that the shards do not divide: these are padded."""
        block, rest = shapes(self.config)
        shared = {name: shape for name, shape in {**block, **rest}.items() if not self.is_whole(name)}
        return [name for name, shape in shared.items() if shape[shard_dim(shape, self.shards)] % self.shards]

    @cached_property
    def values(self) -> tuple[int, int, int]:
        """Of the first GPU's shards, with padding: in all matrices of blocks, in all else in blocks, in the rest."""
        block, rest = shapes(self.config)
        vectors = [s for name, s in block.items() if len(s) == 1 and not self.is_whole(name)]
        matrices, others, outside = (
            sum(prod(self._shard(shape)) for shape in some) for some in (self._matrices, vectors, list(rest.values()))
        )
        return self.config.depth * matrices, self.config.depth * others, outside

    @cached_property
    def whole(self) -> int:
        """Values that each GPU holds whole: biases of linear layers whose weights are stored in 16 bits."""
        own = [shape for name, shape in shapes(self.config)[0].items() if self.is_whole(name)]
        return self.config.depth * sum(map(prod, own))

    @cached_property
    def linear(self) -> int:
        """Of the first GPU's shards of blocks, values in linear layers."""
        block = shapes(self.config)[0]
        own = [shape for name, shape in block.items() if self._linear(name) and not self.is_whole(name)]
        return self.config.depth * sum(prod(self._shard(shape)) for shape in own)

    def is_whole(self, name: str) -> bool:
        """Whether each GPU holds that parameter whole."""
        block = shapes(self.config)[0]
        return self.stored and name in block and self._linear(name) and len(block[name]) == 1

    def _linear(self, name: str) -> bool:
        """Whether a parameter of a block is a linear layer's."""
        return len(shapes(self.config)[0][f"{name.rpartition('.')[0]}.weight"]) == 2

    @property
    def stored(self) -> bool:
        """Whether matrices of blocks, and their gradients, are in 16 bits."""
        return isinstance(self.training.precision, Fp16Weights | Bf16Weights)

    @property
    def halved(self) -> bool:
        """Whether linear layers are gathered in 16 bits: those that train in 8 bits are not."""
        return self.stored or type(self.training.precision) in (Auto, Bf16, Fp16)

    # ------------------------------------------------------------------ memory

    @cached_property
    def state(self) -> dict[str, float]:
        """Weights, gradients, moments, averages, and PowerSGD's error buffers."""
        matrices, others, outside = self.values
        full: float = _FP32 * (sum(self.values) + self.whole)
        weights = full - self.stored * (_FP32 - _HALF) * matrices
        values = matrices, others + self.whole, outside
        moments = sum(n * size for n, size in zip(values, moment_bytes(self.training.optimizer), strict=True))
        averaged = self.training.ema_decay is not None and not self.training.ema_on_cpu
        found = {"weights": weights, "gradients": weights, "moments": moments}
        if averaged:
            found["averaged weights"] = full
        if self.rank is not None:
            found["error buffers"] = _CODE * matrices
        return found

    @property
    def gathered(self) -> tuple[int, int]:
        """Bytes of a whole block and of the whole rest, padding included."""
        return self._blocks // self.config.depth * self.shards, self.values[2] * self.shards * _FP32

    @property
    def held(self) -> int:
        """Bytes of weights that are there whole between the passes: the rest's and, with zero2, those of all blocks,
        otherwise the last one's, which the backward pass begins with."""
        block, rest = self.gathered
        return rest + block * (self.config.depth if self.kind == "zero2" else 1)

    @property
    def _blocks(self) -> int:
        """Bytes of the first GPU's shards of all blocks, as they are gathered."""
        return _FP32 * sum(self.values[:2]) - self.halved * (_FP32 - _HALF) * self.linear

    @property
    def _cost(self) -> Cost:
        """Of one GPU's micro-batch."""
        return Cost(config=self.config, gpus=1, batch=self.samples, device=self.device)

    @cached_property
    def activations(self) -> dict[str, float]:
        """What a micro-batch's forward pass leaves for the backward pass; of the head, gradients."""
        found, c = self._cost.activations(self.training.checkpoint_activations), self.config
        layers = {name: found[name] for name in found if name.startswith("layers")}
        if "layers" in layers:
            layers["layers"] -= self.halved * c.depth * 12 * c.width**2 * _HALF  # no copies of what is in 16 bits
        head = (2 * self.samples * self._cost.positions + c.text_vocab + c.image_vocab) * c.width * _FP32
        return {**layers, "at the loss": head}

    @cached_property
    def peak(self) -> float:
        """The largest of three moments.

        The loss: some logits and their log-probabilities, beside all activations and the last block's weights.
        A block's backward pass: its weights (with zero2 those of all blocks), the ones gathered after it, and its
        gradients are there whole. Shards of gradients grow while activations are freed.
        The end: gradients of the rest are there whole, and again in the order of shards.
        The rest's weights are there whole all the time.
        """
        state, (block, rest) = dict(self.state), self.gathered
        last = self.held - rest  # with zero2, all
        gradients, (layers, head) = state.pop("gradients"), self.activations.values()
        kept = sum(state.values()) + rest
        whole = _FP32 * sum(self.values[:2]) * self.shards  # of all blocks, in fp32
        if self.training.accumulate > 1:  # gradients of earlier micro-batches
            kept += whole + rest
        logits = 2 * _FP32 * min(LOGITS, self.samples * self._cost.positions * self.config.text_vocab)
        working = self._working + max(last, min(2, self.config.depth) * block) + whole / self.config.depth
        loss = layers + head + logits + last
        return kept + max(loss, max(layers, gradients) + head + working, gradients + 2 * rest)

    @property
    def _working(self) -> float:
        """Of a block's backward pass, which begins with its MLP. When attention's turn comes, the MLP has freed in
        16 bits its hidden layer before and after GELU, its input and copies of its matrices, in 32 bits the input of
        its LayerNorm; gradients are there of q, k, v and attention's output in 16 bits, of the identity path twice in
        32. With checkpointing the block's activations are computed again before."""
        cost, d = self._cost, self.config.width
        states = self.samples * cost.positions * d
        again = cost.activations(True)["one layer again"] if self.training.checkpoint_activations else 0
        freed = (8 + 1) * 2 * states + _FP32 * states + 8 * d * d * 2
        gradients = (3 + 1) * 2 * states + 2 * _FP32 * states
        return max(again + cost.mlp, again - freed + gradients + cost.attention)

    # ------------------------------------------------------------------ communication

    @cached_property
    def sent(self) -> dict[str, float]:
        """Bytes that a GPU sends in an update, by collective, but for a few single numbers."""
        matrices, others, rest = self.values
        blocks, parts = matrices + others, self.training.accumulate
        ring, gathered = self.shards - 1, self._gathered_blocks * self._blocks // self.config.depth + _FP32 * rest
        reduced = _FP32 * (others + rest) + self.factors if self.rank is not None else _FP32 * (blocks + rest)
        reduced += _FP32 * self.whole
        return {
            "all-gather": ring * (parts * gathered + _FP32 * matrices * self._gathers),
            "reduce-scatter": ring * _FP32 * (blocks + rest),
            "all-reduce": 2 * (self.replicas - 1) / self.replicas * reduced
            + 2 * (self.gpus - 1) / self.gpus * _FP32 * self.whole,
        }

    @property
    def _gathered_blocks(self) -> int:
        """Blocks gathered for a micro-batch: with zero2 each once, otherwise each but the last one twice."""
        return self.config.depth if self.kind == "zero2" else 2 * self.config.depth - 1

    @property
    def _gathers(self) -> bool:
        """Whether the optimiser gathers what it makes of each matrix."""
        return self.training.optimizer.gathers_matrices and self.shards > 1

    @property
    def calls(self) -> dict[str, int]:
        """How often a GPU calls each collective in an update for weights and gradients, uncompressed."""
        depth, shared, groups = self.config.depth, self.shards > 1, 1 + self.halved  # of a block
        gathers = depth * len(self._matrices) * self._gathers
        return {
            "all-gather": shared * (self.training.accumulate * (self._gathered_blocks * groups + 1) + gathers),
            "reduce-scatter": shared * (depth * groups + 1),
            # Of resblocks, embeddings, head; of what each GPU holds whole.
            "all-reduce": (2 * depth + 2 if self.replicas > 1 else 0) + self.stored,
        }

    @property
    def uncompressed(self) -> Launch:
        """It without PowerSGD, as `dry_run.py` runs it."""
        return replace(self, rank=None)

    @property
    def factors(self) -> int:
        """Bytes of P and Q of all matrices."""
        if self.rank is None:
            return 0
        each = self.rank // self.shards
        return _CODE * each * self.config.depth * sum(sum(self._shard(shape)) for shape in self._matrices)

    @property
    def flops(self) -> float:
        """Of one GPU in an update. PowerSGD multiplies each shard three times by a factor: E Q, E^T P and P Q^T."""
        whole = Cost(config=self.config, gpus=self.gpus, batch=self.training.batch_size)
        compression = 6 * self.values[0] * (self.rank or 0) // self.shards
        return whole.flops(self.training.checkpoint_activations) / self.gpus + compression
