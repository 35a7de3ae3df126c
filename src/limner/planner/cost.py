"""Parameters, FLOPs and KV cache of a prior, the size of optimizer state, and the paper's tables on PowerSGD.

The tables hold for any width and rank (Ramesh et al. 2021, §2.5, App. E.1). `launch.py` has memory and communication.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import ceil

import torch

from limner.attention.patterns import Pattern
from limner.models.transformer import TransformerConfig
from limner.optim.optimizers import OptimizerConfig

GB = 1e9
FP32, HALF = 4, 2  # bytes per value
Shape = tuple[int, ...]

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


def count_parameters(config: TransformerConfig) -> Counter[str]:
    """Count parameters by kind, of a model built on the meta device."""
    with torch.device("meta"):
        model = config.build()
    counts: Counter[str] = Counter()
    for name, p in model.named_parameters():
        if name.startswith("blocks."):
            name = name.split(".", 2)[2]
        counts[_PARAMETER_KINDS.get(name, "gains and biases")] += p.numel()
    return counts


@lru_cache(maxsize=16)
def parameter_shapes(config: TransformerConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the parameter shapes of a block and of the rest, by name."""
    with torch.device("meta"):
        model = config.build()
    block = {f"blocks.0.{name}": tuple(p.shape) for name, p in model.blocks[0].named_parameters()}
    return block, {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith("blocks.")}


@lru_cache(maxsize=16)
def moment_bytes(optimizer: OptimizerConfig) -> tuple[float, ...]:
    """Measure the optimizer's bytes per value, for matrices of blocks, other tensors of blocks, and the rest, on a very
    small model after a step."""
    config = TransformerConfig(text_vocab=8, image_vocab=8, text_len=2, grid=(2, 2), width=16, depth=1, heads=1)
    model = config.build()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    counts, sizes = [0, 0, 0], [0, 0, 0]
    groups: dict[torch.Tensor, int] = {p: int(p.ndim < 2) for p in model.blocks.parameters()}
    for part in optimizer.build(model):
        part.step()
        for p, state in part.state.items():
            group = groups.get(p, 2)
            counts[group] += p.numel()
            sizes[group] += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.shape == p.shape)
    return tuple(size / count for size, count in zip(sizes, counts, strict=True))


def effective_parameters(config: TransformerConfig) -> int:
    """Return the paper's parameter count, 12 n_layer d_model^2."""
    return 12 * config.depth * config.width**2


def num_positions(config: TransformerConfig) -> int:
    """Return the positions of a sequence: text, start of image, image."""
    return config.text_len + 1 + config.grid[0] * config.grid[1]


def attended_pairs(config: TransformerConfig, pattern: Pattern) -> int:
    """Count the (query, key) pairs of a sequence that a pattern allows."""
    p, s = config.text_len + 1, config.grid[0] * config.grid[1]
    return p * (p + 1) // 2 + s * p + s * len(pattern.offsets) - sum(pattern.offsets)


def training_flops(config: TransformerConfig, batch: int, checkpointing: bool = False) -> int:
    """Return the FLOPs of a batch: one forward pass, two with checkpointing, and backward, which costs two."""
    # All text tokens but the first, and all image tokens, are predicted.
    logits = (config.text_len - 1) * config.text_vocab + config.grid[0] * config.grid[1] * config.image_vocab
    products = effective_parameters(config) * num_positions(config) + config.width * logits
    attention = sum(attended_pairs(config, pattern) for pattern in config.patterns)
    return batch * (2 * products + 4 * config.width * attention) * (4 if checkpointing else 3)


def decode_step(config: TransformerConfig, candidates: int) -> tuple[float, float]:
    """Return the mean FLOPs and bytes read in 16 bits to sample one position of a caption's candidates. Weights and
    text keys are read once, image keys once per candidate."""
    p, s = config.text_len + 1, config.grid[0] * config.grid[1]
    weights = effective_parameters(config) + config.width * config.image_vocab
    image = sum((attended_pairs(config, pattern) - p * (p + 1) // 2) / s - p for pattern in config.patterns)
    flops = candidates * (2 * weights + 4 * config.width * (image + config.depth * p))
    return flops, HALF * (weights + 2 * config.width * (candidates * image + config.depth * p))


def kv_cache(config: TransformerConfig, dense: bool = False) -> tuple[float, float]:
    """Return the bytes of the 16-bit KV cache: per caption, and per candidate."""
    position = 2 * config.width * HALF
    if dense:
        return 0, config.depth * num_positions(config) * position
    slots = sum(pattern.cache_slots() for pattern in config.patterns)
    return config.depth * (config.text_len + 1) * position, slots * position


def default_rank(width: int) -> int:
    """Return PowerSGD's rank for a width: the paper's at its three widths (Table 1), proportional for other widths."""
    return max(128, 128 * ceil(0.225 * width / 128))


def compression_rate(width: int, rank: int, m: int = 8) -> float:
    """Return the share of traffic saved, 1 - r (m + 2) / (2 d m), which is 1 - 5 r / 8 d for m = 8 (App. E.1)."""
    return 1 - rank * (m + 2) / (2 * width * m)


def table1() -> list[tuple[int, int, int, float]]:
    """Return the rows of Table 1: effective parameters, width, rank, compression rate, for 64 layers."""
    return [(12 * 64 * d * d, d, r, compression_rate(d, r)) for d, r in ((1920, 512), (2688, 640), (3968, 896))]


def table2(d: int, r: int, m: int) -> dict[str, tuple[float, float, float]]:
    """Return Table 2: numbers of values of a layer's gradient shard and of its factors P and Q, sent by one GPU."""
    rows: dict[str, tuple[float, float, float]] = {
        "qkv and post-attention matrices": (4 * d * d / m, 4 * d * r / m, 4 * r / m * d / m),
        "first MLP matrix": (d * 4 * d / m, d * r / m, r / m * 4 * d / m),
        "second MLP matrix": (4 * d / m * d, 4 * d / m * r / m, r / m * d),
    }
    rows["total size"] = tuple(map(sum, zip(*rows.values(), strict=True)))  # pyright: ignore[reportArgumentType]
    return rows
