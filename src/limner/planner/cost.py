"""Analytic cost of training and sampling a prior: parameters, state, activations, FLOPs, caches.

Parameters are counted on the meta device. The rest is arithmetic over a `TransformerConfig`, with one method per term
and without a GPU. `paper_layout.py` and `launch.py` use it with their numbers of shards, formats and collectives.

Shapes: B samples on a GPU, N = P + S positions, D width, L layers, H heads, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from limner.attention.patterns import Pattern
from limner.attention.sparse import SparseAttention, training_attention
from limner.models.transformer import TransformerConfig
from limner.objectives.cross_entropy import LOGITS_PER_CHUNK
from limner.optim.optimizers import OptimizerConfig

Shape = tuple[int, ...]
GB = 1e9
FP32, HALF = 4, 2  # bytes per value

_PARAMETER_KINDS = {
    "attention.branch.qkv.weight": "queries, keys, values",
    "attention.branch.out.weight": "attention outputs",
    "mlp.branch.up.weight": "first MLP matrices",
    "mlp.branch.down.weight": "second MLP matrices",
    "embed.text.weight": "text embedding",
    "embed.text_position.weight": "text positions",
    "embed.padding.weight": "padding, one per position",
    "embed.start": "start of image",
    "embed.image.weight": "image embedding",
    "embed.row.weight": "rows",
    "embed.column.weight": "columns",
    "head.text.weight": "text unembedding",
    "head.image.weight": "image unembedding",
}
MATRICES = tuple(_PARAMETER_KINDS.values())[:4]  # sharded in 16 bits and compressed


@lru_cache(maxsize=16)
def parameter_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Return the shapes of the parameters outside the blocks and of the first block, by name, in the model's order."""
    with torch.device("meta"):
        model = config.build()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {name: shape for name, shape in shapes.items() if name.startswith("blocks.0.") or not in_block(name)}


def in_block(name: str) -> bool:
    """Return True for a parameter of a block."""
    return name.startswith("blocks.")


def count_parameters(config: TransformerConfig) -> Counter[str]:
    """Count parameters by kind."""
    counts: Counter[str] = Counter()
    for name, shape in parameter_shapes(config).items():
        kind = _PARAMETER_KINDS.get(name.removeprefix("blocks.0."), "gains and biases")
        counts[kind] += prod(shape) * (config.depth if in_block(name) else 1)
    return counts


def attended_pairs(config: TransformerConfig, pattern: Pattern) -> int:
    """Count the (query, key) pairs of a sequence that a pattern allows."""
    p, s = config.text_len + 1, config.grid[0] * config.grid[1]
    return p * (p + 1) // 2 + s * p + s * len(pattern.offsets) - sum(pattern.offsets)


def parameter_kind(name: str, shape: Sequence[int]) -> int:
    """Return 0 for a matrix of a block, 1 for another tensor of a block, 2 for the rest."""
    return int(len(shape) < 2) if in_block(name) else 2


@lru_cache(maxsize=16)
def moment_bytes(optimizer: OptimizerConfig) -> tuple[float, ...]:
    """Measure the optimizer's bytes per value, for matrices of blocks, other tensors of blocks, and the rest, on a very
    small model after a step."""
    config = TransformerConfig(text_vocab=8, image_vocab=8, text_len=2, grid=(2, 2), width=16, depth=1, heads=1)
    model = config.build()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    states: dict[Any, Mapping[str, Any]] = {}
    for part in optimizer.build(model):
        part.step()
        states |= part.state
    sizes, values = [0, 0, 0], [0, 0, 0]
    for name, p in model.named_parameters():
        moments = [v for v in states[p].values() if isinstance(v, torch.Tensor) and v.shape == p.shape]
        sizes[parameter_kind(name, p.shape)] += sum(v.nbytes for v in moments)
        values[parameter_kind(name, p.shape)] += p.numel()
    return tuple(size / n for size, n in zip(sizes, values, strict=True))


def training_state(
    values: Sequence[float], matrix_bytes: int, moment_bytes: Sequence[float], averages: bool, error_buffers: bool
) -> dict[str, float]:
    """Return the bytes of weights, gradients, moments, averaged weights, and PowerSGD's error buffers on a GPU.

    Args:
        values: numbers of values of matrices of blocks, other tensors of blocks, and the rest.
        matrix_bytes: per value of the matrices and their gradients; all others, and averages, are fp32.
        moment_bytes: of the optimizer, per value of the three kinds.
        averages, error_buffers: whether the GPU stores them.
    """
    matrices, vectors, rest = values
    weights = matrices * matrix_bytes + (vectors + rest) * FP32
    moments = sum(n * size for n, size in zip(values, moment_bytes, strict=True))
    state = {"weights": weights, "gradients": weights, "moments": moments}
    if averages:
        state["averaged weights"] = (matrices + vectors + rest) * FP32
    if error_buffers:
        state["error buffers"] = matrices * HALF
    return state


@lru_cache(maxsize=16)
def _attention_size(config: TransformerConfig, pattern: Pattern, device: str) -> tuple[bool, int, int, int]:
    """Return the size of an attention: sparse or not, weights and keys of one sequence, sequences per kernel call."""
    path = training_attention(pattern, config.text_len + 1)
    if isinstance(path, SparseAttention):
        return True, path.bias.numel(), path.bias.numel() // path.queries, path.sequences_per_part(device)
    n = config.text_len + 1 + config.grid[0] * config.grid[1]
    return False, n**2, n, 1 << 62


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one GPU's samples in a forward and backward pass.

    Args:
        config: the model.
        samples: B.
        device: device type, which sets the number of sequences per attention kernel call.
    """

    config: TransformerConfig
    samples: int = 1
    device: str = "cpu"

    @property
    def effective_parameters(self) -> int:
        """The paper's parameter count, 12 n_layer d_model^2."""
        return 12 * self.config.depth * self.config.width**2

    @property
    def positions(self) -> int:
        return self.config.text_len + 1 + self.config.grid[0] * self.config.grid[1]

    def activations(self, checkpointing: bool, copies: bool = True) -> dict[str, float]:
        """Return the bytes that layers store for the backward pass: matrix products in 16 bits, the identity path in
        32. `copies`: matrices are stored in fp32, and copied in 16 bits."""
        c = self.config
        copied = 12 * c.width**2 * HALF if copies else 0
        layers = [self._layer(pattern) + copied for pattern in c.patterns]
        if checkpointing:
            inputs = self.samples * self.positions * c.width * FP32 * c.depth
            return {"layers' inputs": inputs, "one layer recomputed": max(layers)}
        return {"layers": sum(layers)}

    def _layer(self, pattern: Pattern) -> float:
        """Bytes that a layer stores. In 32 bits: the inputs of its two LayerNorms. In 16 bits: their outputs, q, k, v,
        the output of attention, and the MLP's hidden layer before and after GELU."""
        c, b = self.config, self.samples
        d, n, p = c.width, self.positions, c.text_len + 1
        states = b * n * d * (2 * FP32 + (2 + 3 + 1 + 8) * HALF)
        sparse = _attention_size(c, pattern, self.device)[0]
        return states + b * c.heads * (p * p if sparse else n * n) * HALF

    def logits(self, vocab: int) -> int:
        """Return the bytes of a chunk of at most `LOGITS_PER_CHUNK` logits and log-probabilities in 32 bits."""
        return 2 * FP32 * min(LOGITS_PER_CHUNK, self.samples * self.positions * vocab)

    @property
    def mlp_workspace(self) -> float:
        """Temporary bytes of an MLP's backward pass: the gradient of the identity path twice in 32 bits, that of the
        hidden layer twice in 16."""
        return self.samples * self.positions * self.config.width * (2 * FP32 + 8 * HALF)

    @property
    def attention_workspace(self) -> float:
        """Temporary bytes of attention's backward pass: scores, softmax and keys of all blocks in 32 bits, weights and
        keys of all blocks in 16."""
        c, sizes = self.config, []
        for pattern in set(c.patterns):
            _, weights, keys, at_once = _attention_size(c, pattern, self.device)
            each = weights * (2 * FP32 + HALF) + keys * (c.width // c.heads) * (FP32 + HALF)
            sizes.append(min(self.samples * c.heads, at_once) * each)
        return max(sizes)

    def flops(self, checkpointing: bool = False) -> float:
        """Return the FLOPs of all samples: a forward pass, two with checkpointing, and backward, which costs two."""
        c = self.config
        attention = sum(attended_pairs(c, pattern) for pattern in c.patterns)
        logits = (c.text_len - 1) * c.text_vocab + c.grid[0] * c.grid[1] * c.image_vocab  # no logits of the first token
        forward = 2 * (self.effective_parameters * self.positions + c.width * logits) + 4 * c.width * attention
        return self.samples * forward * (4 if checkpointing else 3)

    def kv_cache(self, dense: bool = False) -> tuple[float, float]:
        """Return the bytes of the 16-bit KV cache: per caption, and per candidate."""
        c = self.config
        p, s = c.text_len + 1, c.grid[0] * c.grid[1]
        position = 2 * c.width * HALF
        if dense:
            return 0, c.depth * (p + s) * position
        return c.depth * p * position, sum(pattern.cache_slots for pattern in c.patterns) * position

    def decode_step(self, candidates: int) -> tuple[float, float]:
        """Return the mean FLOPs and bytes read in 16 bits to sample one position of a caption's candidates. Weights and
        text keys are read once, image keys once per candidate."""
        c = self.config
        p, s = c.text_len + 1, c.grid[0] * c.grid[1]
        weights = self.effective_parameters + c.width * c.image_vocab
        image = sum((attended_pairs(c, pattern) - p * (p + 1) // 2) / s - p for pattern in c.patterns)
        flops = candidates * (2 * weights + 4 * c.width * (image + c.depth * p))
        return flops, HALF * (weights + 2 * c.width * (candidates * image + c.depth * p))
