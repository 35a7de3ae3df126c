"""Analytic cost of training a prior: parameters, memory, FLOPs, communication, time.

Parameters are counted on the meta device. The rest is arithmetic over a `TransformerConfig`, with one method per term
and without a GPU. A test compares the memory with measured peaks. Assumptions that cannot be derived are in `gpus.py`.

The layout is the paper's (§2.4, §2.5, Figure 5): each machine has a copy of the parameters, sharded over `m` GPUs.
Machines average gradients, optionally compressed by PowerSGD to rank r. Each GPU has its own samples.

Shapes: B samples on a GPU, N = P + S positions, D width, L layers, H heads, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

import torch

from limner.attention.patterns import Pattern
from limner.attention.sparse import SparseAttention, training_attention
from limner.models.transformer import TransformerConfig
from limner.objectives.cross_entropy import LOGITS_PER_CHUNK
from limner.planner.compression import default_rank, table2
from limner.planner.gpus import GPUS

GB = 1e9
_FP32, _HALF = 4, 2  # bytes per value

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


def attended_pairs(config: TransformerConfig, pattern: Pattern) -> int:
    """Count the (query, key) pairs of a sequence that a pattern allows."""
    p, s = config.text_len + 1, config.grid[0] * config.grid[1]
    return p * (p + 1) // 2 + s * p + s * len(pattern.offsets) - sum(pattern.offsets)


@lru_cache(maxsize=16)
def _attention_size(config: TransformerConfig, pattern: Pattern, device: str = "cpu") -> tuple[bool, int, int, int]:
    """Return the size of an attention: sparse or not, weights and keys of one sequence, sequences per kernel call."""
    path = training_attention(pattern, config.text_len + 1)
    if isinstance(path, SparseAttention):
        return True, path.bias.numel(), path.bias.numel() // path.queries, path.sequences_per_part(device)
    n = config.text_len + 1 + config.grid[0] * config.grid[1]
    return False, n**2, n, 1 << 62


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one prior on one type of machine: bytes per GPU, FLOPs and seconds per step.

    Args:
        config: the model.
        gpu, gpus: a name in `GPUS`, and the number of GPUs.
        per_machine: GPUs of a machine, over which its copy of the parameters is sharded.
        batch: samples per step over all GPUs.
        rank: r of PowerSGD over all shards (Table 1); None means `default_rank`.
        half_moments: store Adam's moments of the blocks' matrices in 16 bits (`AdamW16`).
        device: device type, which sets the number of sequences per attention kernel call.
    """

    config: TransformerConfig
    gpu: str = "v100-16gb"
    gpus: int = 8
    per_machine: int = 8
    batch: int = 64
    rank: int | None = None
    half_moments: bool = False
    device: str = "cpu"

    @property
    def effective_parameters(self) -> int:
        """The paper's parameter count, 12 n_layer d_model^2."""
        return 12 * self.config.depth * self.config.width**2

    @property
    def m(self) -> int:
        return min(self.per_machine, self.gpus)

    @property
    def machines(self) -> int:
        return ceil(self.gpus / self.m)

    @property
    def samples(self) -> int:
        """B, the largest number of samples on a GPU."""
        return ceil(self.batch / self.gpus)

    @property
    def positions(self) -> int:
        return self.config.text_len + 1 + self.config.grid[0] * self.config.grid[1]

    @property
    def _logit_count(self) -> int:
        """Logits of one sample: all text tokens but the first, all image tokens."""
        c = self.config
        return (c.text_len - 1) * c.text_vocab + c.grid[0] * c.grid[1] * c.image_vocab

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Numbers of parameters in the blocks' matrices and elsewhere."""
        counts = count_parameters(self.config)
        matrices = sum(counts[kind] for kind in MATRICES)
        return matrices, counts.total() - matrices

    # ------------------------------------------------------------------ memory

    def state(self, half: bool) -> dict[str, float]:
        """Return the bytes of weights, gradients, moments and averages, sharded over the machine.

        `half` is the paper's storage (App. B.2, D), the precision `Fp16Weights` with `AdamW16`: the blocks' matrices,
        their gradients and both Adam moments in 16 bits, the rest in 32, averaged weights in host memory, and an error
        buffer for PowerSGD between machines. Otherwise everything is fp32, except for moments if `half_moments`.
        """
        matrices, rest = (n / self.m for n in self.sizes)
        size = _HALF if half else _FP32
        values = matrices * size + rest * _FP32
        moments = 2 * (matrices * (_HALF if half or self.half_moments else _FP32) + rest * _FP32)
        state = {"weights": values, "gradients": values, "moments": moments}
        if half and self.machines > 1:
            state["error buffers"] = matrices * _HALF
        elif not half:
            state["averaged weights"] = values
        if self.m > 1:  # the current layer and the prefetched next one (Figure 5)
            state["gathered layers"] = 2 * matrices * self.m / self.config.depth * _HALF
        return state

    def activations(self, checkpointing: bool, half: bool = False) -> dict[str, float]:
        """Return the bytes stored for the backward pass: matrix products in 16 bits, the identity path in 32. With
        `half`, matrices are in 16 bits already and are not copied."""
        c, resblocks = self.config, [self.resblocks(pattern, half) for pattern in self.config.patterns]
        inputs = 2 * c.depth * self.samples * self.positions * c.width * _FP32
        if checkpointing:
            largest = max(map(max, resblocks))
            return {"resblocks' inputs": inputs, "one resblock recomputed": largest, "logits": self._logits}
        return {"layers": inputs + sum(map(sum, resblocks)), "logits": self._logits}

    def resblocks(self, pattern: Pattern, half: bool = False) -> tuple[float, float]:
        """Return the bytes that a layer's attention and MLP store in addition to their inputs, all in 16 bits: outputs
        of LayerNorm; q, k, v, weights and the output of attention; the MLP's hidden layer before and after GELU."""
        c, b, n, p = self.config, self.samples, self.positions, self.config.text_len + 1
        weights = b * c.heads * (p * p if _attention_size(c, pattern)[0] else n * n) * _HALF
        values, copies = b * n * c.width * _HALF, 0 if half else c.width**2 * _HALF
        return (1 + 3 + 1) * values + weights + 4 * copies, (1 + 8) * values + 8 * copies

    @property
    def _logits(self) -> float:
        """Bytes of a chunk of at most `LOGITS_PER_CHUNK` logits and log-probabilities, and of the gradients of the
        head's inputs and weights, all in 32 bits."""
        c = self.config
        vocab = max(c.text_vocab, c.image_vocab)
        gradients = (self.samples * self.positions + 2 * vocab) * c.width * _FP32
        return 2 * _FP32 * min(LOGITS_PER_CHUNK, self.samples * self.positions * vocab) + gradients

    @property
    def workspace(self) -> float:
        """Peak of temporary bytes in one layer's backward pass, over both resblocks."""
        return self.mlp_workspace + self.attention_workspace

    @property
    def mlp_workspace(self) -> float:
        """Temporary bytes of an MLP's backward pass: the gradient of the identity path twice in 32 bits, that of the
        hidden layer twice in 16."""
        return self.samples * self.positions * self.config.width * (2 * _FP32 + 8 * _HALF)

    @property
    def attention_workspace(self) -> float:
        """Temporary bytes of attention's backward pass: scores, softmax and keys of all blocks in 32 bits, weights and
        keys of all blocks in 16."""
        c, sizes = self.config, []
        for pattern in set(c.patterns):
            _, weights, keys, at_once = _attention_size(c, pattern, self.device)
            each = weights * (2 * _FP32 + _HALF) + keys * (c.width // c.heads) * (_FP32 + _HALF)
            sizes.append(min(self.samples * c.heads, at_once) * each)
        return max(sizes)

    def memory(self, half: bool, checkpointing: bool) -> float:
        """Return the peak in bytes. Gradients grow while activations are freed, so the larger of the two counts."""
        state, activations = self.state(half), sum(self.activations(checkpointing, half).values())
        gradients = state.pop("gradients")
        return sum(state.values()) + max(gradients, activations) + self.workspace

    def kv_cache(self, dense: bool = False) -> tuple[float, float]:
        """Return the bytes of the 16-bit KV cache: per caption, and per candidate."""
        c = self.config
        p, s = c.text_len + 1, c.grid[0] * c.grid[1]
        position = 2 * c.width * _HALF
        if dense:
            return 0, c.depth * (p + s) * position
        return c.depth * p * position, sum(pattern.cache_slots() for pattern in c.patterns) * position

    # ------------------------------------------------------------------ arithmetic

    def flops(self, checkpointing: bool = False) -> float:
        """Return the FLOPs of all GPUs: one forward pass, two with checkpointing, and backward, which costs two."""
        c = self.config
        attention = sum(attended_pairs(c, pattern) for pattern in c.patterns)
        forward = (
            2 * (self.effective_parameters * self.positions + c.width * self._logit_count) + 4 * c.width * attention
        )
        return self.batch * forward * (4 if checkpointing else 3)

    def decode_step(self, candidates: int) -> tuple[float, float]:
        """Return the mean FLOPs and bytes read in 16 bits to sample one position of a caption's candidates. Weights and
        text keys are read once, image keys once per candidate."""
        c = self.config
        p, s = c.text_len + 1, c.grid[0] * c.grid[1]
        weights = self.effective_parameters + c.width * c.image_vocab
        image = sum((attended_pairs(c, pattern) - p * (p + 1) // 2) / s - p for pattern in c.patterns)
        flops = candidates * (2 * weights + 4 * c.width * (image + c.depth * p))
        return flops, _HALF * (weights + 2 * c.width * (candidates * image + c.depth * p))

    def memory_traffic(self, half: bool, checkpointing: bool) -> float:
        """Return a lower bound of the bytes that a GPU reads and writes: weights once per pass, state once per update,
        activations written and read."""
        passes = 3 if checkpointing else 2
        gathered = sum(self.sizes) * _HALF * passes
        state = self.state(half)
        update = 2 * (state["weights"] + state["moments"]) + state["gradients"]
        return gathered + update + 2 * sum(self.activations(checkpointing, half).values())

    # ------------------------------------------------------------------ communication

    @property
    def r(self) -> int:
        return default_rank(self.config.width) if self.rank is None else self.rank

    @property
    def sent_within(self) -> float:
        """Bytes that a GPU sends within its machine: two all-gathers of weights, one reduce-scatter of gradients."""
        return 3 * (self.m - 1) / self.m * sum(self.sizes) * _HALF

    def sent_between(self, compressed: bool) -> float:
        """Return the bytes that a GPU sends to other machines: a ring all-reduce of its gradient shard (Table 2)."""
        rest = self.sizes[1] / self.m * _FP32  # never compressed
        table = table2(self.config.width, self.r, self.m)["total size"]
        matrices = self.config.depth * (sum(table[1:]) if compressed else table[0]) * _HALF
        return 2 * (self.machines - 1) / self.machines * (matrices + rest)

    def seconds(self, gpu: str, checkpointing: bool, compressed: bool) -> float:
        """Return the time of a step. Computation overlaps traffic within a machine (Figure 5), not between machines."""
        kind = GPUS[gpu]
        compute = self.flops(checkpointing) / self.gpus / (kind.peak_flops * kind.mfu)
        return (
            max(compute, self.sent_within / kind.intra_node_bandwidth)
            + self.sent_between(compressed) / kind.inter_node_bandwidth
        )
