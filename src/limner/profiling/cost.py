"""What training a prior will cost, by calculation: parameters, memory, arithmetic, communication, time.

Parameters are counted on the meta device. The rest is arithmetic over a `TransformerConfig`, each term
named here; no GPU is touched. A test compares the memory with measured peaks. What is assumed rather
than derived is in `gpus.py`.

The layout is the paper's (§2.4, §2.5, Figure 5): each machine holds one copy of the parameters, sharded
over its `m` GPUs; machines average gradients, PowerSGD-compressed to rank r or not; each GPU has samples
of its own.

Shapes: B samples on a GPU, N = P + S positions, D width, L layers, H heads, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

import torch

from limner.layers.cross_entropy import LOGITS
from limner.layers.patterns import Pattern
from limner.layers.sparse import SparseAttention, training_core
from limner.models.transformer import TransformerConfig
from limner.profiling.compression import default_rank, table2
from limner.profiling.gpus import GPUS

GB = 1e9
_MASTER = 4  # bytes of an fp32 value
_HALF = 2  # bytes of a 16-bit value


_KINDS = {
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
MATRICES = tuple(_KINDS.values())[:4]  # what is sharded in 16 bits and compressed


def parameters(config: TransformerConfig) -> Counter[str]:
    """Numbers of parameters by kind, of a model built on the meta device."""
    with torch.device("meta"):
        model = config.build()
    found: Counter[str] = Counter()
    for name, p in model.named_parameters():
        if name.startswith("blocks."):
            name = name.split(".", 2)[2]
        found[_KINDS.get(name, "gains and biases")] += p.numel()
    return found


def visible_pairs(config: TransformerConfig, pattern: Pattern) -> int:
    """How many pairs (position, position that it sees) a sequence has in a layer of that pattern."""
    p, s = config.text_len + 1, config.grid[0] * config.grid[1]
    return p * (p + 1) // 2 + s * p + s * len(pattern.offsets) - sum(pattern.offsets)


@lru_cache(maxsize=16)
def _weights(config: TransformerConfig, pattern: Pattern, device: str = "cpu") -> tuple[bool, int, int, int]:
    """How layers of a pattern attend: sparsely or not, weights and keys of one sequence, and sequences at once."""
    path = training_core(pattern, config.text_len + 1)
    if isinstance(path, SparseAttention):
        return True, path.bias.numel(), path.bias.numel() // path.queries, path.at_once_on(device)
    n = config.text_len + 1 + config.grid[0] * config.grid[1]
    return False, n**2, n, 1 << 62


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One prior on one kind of machine. Bytes are of one GPU, FLOPs and seconds of one step.

    Args:
        config: the model.
        gpu, gpus: a name in `GPUS`, and how many.
        per_machine: m, among which a machine's copy of the parameters is sharded.
        batch: samples per step, over all GPUs.
        rank: r of PowerSGD, over all shards together (Table 1); None takes `default_rank`.
        packed: Adam's moments of the blocks' matrices are in 16 bits even where all else is fp32 (`AdamW16`).
        device: the type of device whose parts attention works on: a GPU takes more sequences at once.
    """

    config: TransformerConfig
    gpu: str = "v100-16gb"
    gpus: int = 8
    per_machine: int = 8
    batch: int = 64
    rank: int | None = None
    packed: bool = False
    device: str = "cpu"

    @property
    def effective(self) -> int:
        """12 n_layer d_model^2, the paper's count of parameters."""
        return 12 * self.config.depth * self.config.width**2

    @property
    def m(self) -> int:
        return min(self.per_machine, self.gpus)

    @property
    def machines(self) -> int:
        return ceil(self.gpus / self.m)

    @property
    def samples(self) -> int:
        """B: on the fullest GPU."""
        return ceil(self.batch / self.gpus)

    @property
    def positions(self) -> int:
        return self.config.text_len + 1 + self.config.grid[0] * self.config.grid[1]

    @property
    def _predicted(self) -> int:
        """Logits of one sample: text_1 and on, then all of the image."""
        c = self.config
        return (c.text_len - 1) * c.text_vocab + c.grid[0] * c.grid[1] * c.image_vocab

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Parameters in the blocks' matrices, and all others."""
        counts = parameters(self.config)
        matrices = sum(counts[kind] for kind in MATRICES)
        return matrices, counts.total() - matrices

    # ------------------------------------------------------------------ memory

    def state(self, half: bool) -> dict[str, float]:
        """Weights, gradients, moments and averages, sharded over the machine.

        `half` is the paper's storage (App. B.2, D), which the precision `Fp16Weights` has with `AdamW16`: the blocks'
        matrices, their gradients and both Adam moments in 16 bits, everything else in 32, the averaged weights in the
        host's memory, and an error buffer for PowerSGD between machines. Else all is fp32, as one GPU trains here by
        default, but for moments if `packed`.
        """
        matrices, others = (n / self.m for n in self.sizes)
        size = _HALF if half else _MASTER
        values = matrices * size + others * _MASTER
        moments = 2 * (matrices * (_HALF if half or self.packed else _MASTER) + others * _MASTER)
        found = {"weights": values, "gradients": values, "moments": moments}
        if half and self.machines > 1:
            found["error buffers"] = matrices * _HALF
        elif not half:
            found["averaged weights"] = values
        if self.m > 1:  # the layer at work and the next, gathered (Figure 5)
            found["gathered layers"] = 2 * matrices * self.m / self.config.depth * _HALF
        return found

    def activations(self, checkpointing: bool, half: bool = False) -> dict[str, float]:
        """What is stored for the backward pass; matrix products in 16 bits, the identity path in 32. Matrices that are
        in 16 bits anyway (`half`) need no copies there."""
        c, rows = self.config, self.samples * self.positions
        copies = 0 if half else 12 * c.width**2 * _HALF
        layers = [self._layer(pattern) + copies for pattern in c.patterns]
        if checkpointing:
            inputs = rows * c.width * _MASTER * c.depth
            return {"layers' inputs": inputs, "one layer again": max(layers), "logits": self._logits}
        return {"layers": sum(layers), "logits": self._logits}

    def _layer(self, pattern: Pattern) -> float:
        """What a layer stores. In 32 bits: the inputs of its two LayerNorms. In 16 bits: their outputs, q, k, v, the
        attention's output, and the MLP's hidden layer before and after GELU."""
        c, b = self.config, self.samples
        d, n, p = c.width, self.positions, c.text_len + 1
        states = b * n * d * (2 * _MASTER + (2 + 3 + 1 + 8) * _HALF)
        weights = b * c.heads * (p * p if _weights(c, pattern)[0] else n * n) * _HALF
        return states + weights

    @property
    def _logits(self) -> float:
        """At most `LOGITS` of them at a time with their log-probabilities, and the gradients of the head's inputs and
        weights, all in 32 bits."""
        c = self.config
        vocab = max(c.text_vocab, c.image_vocab)
        made = (self.samples * self.positions + 2 * vocab) * c.width * _MASTER
        return 2 * _MASTER * min(LOGITS, self.samples * self.positions * vocab) + made

    @property
    def working(self) -> float:
        """Held during one layer's backward pass, at most: by both resblocks."""
        return self.mlp + self.attention

    @property
    def mlp(self) -> float:
        """Held during an MLP's backward pass: in 32 bits the gradient of the identity path twice, in 16 bits that of
        the hidden layer twice."""
        return self.samples * self.positions * self.config.width * (2 * _MASTER + 8 * _HALF)

    @property
    def attention(self) -> float:
        """Held during attention's backward pass. In 32 bits: scores and their softmax, the keys of all blocks. In
        16 bits: the weights, the keys of all blocks."""
        c, found = self.config, []
        for pattern in set(c.patterns):
            _, weights, keys, at_once = _weights(c, pattern, self.device)
            each = weights * (2 * _MASTER + _HALF) + keys * (c.width // c.heads) * (_MASTER + _HALF)
            found.append(min(self.samples * c.heads, at_once) * each)
        return max(found)

    def memory(self, half: bool, checkpointing: bool) -> float:
        """The peak: gradients grow while activations are freed, so the larger of both counts."""
        state, activations = self.state(half), sum(self.activations(checkpointing, half).values())
        gradients = state.pop("gradients")
        return sum(state.values()) + max(gradients, activations) + self.working

    def cache(self, dense: bool = False) -> tuple[float, float]:
        """Bytes that sampling stores in 16 bits: of a caption, and of each of its candidates."""
        c = self.config
        p, s = c.text_len + 1, c.grid[0] * c.grid[1]
        position = 2 * c.width * _HALF
        if dense:
            return 0, c.depth * (p + s) * position
        return c.depth * p * position, sum(pattern.held for pattern in c.patterns) * position

    # ------------------------------------------------------------------ arithmetic

    def flops(self, checkpointing: bool = False) -> float:
        """Of all GPUs: forward once, or twice with checkpointing, and backward, which costs two forwards."""
        c = self.config
        attention = sum(visible_pairs(c, pattern) for pattern in c.patterns)
        forward = 2 * (self.effective * self.positions + c.width * self._predicted) + 4 * c.width * attention
        return self.batch * forward * (4 if checkpointing else 3)

    def drawing(self, candidates: int) -> tuple[float, float]:
        """FLOPs, and bytes read in 16 bits, of one position of a caption's candidates, averaged over a picture:
        weights and text once, and for each candidate what its pattern sees of the image."""
        c = self.config
        p, s = c.text_len + 1, c.grid[0] * c.grid[1]
        weights = self.effective + c.width * c.image_vocab
        image = sum((visible_pairs(c, pattern) - p * (p + 1) // 2) / s - p for pattern in c.patterns)
        flops = candidates * (2 * weights + 4 * c.width * (image + c.depth * p))
        return flops, _HALF * (weights + 2 * c.width * (candidates * image + c.depth * p))

    def traffic(self, half: bool, checkpointing: bool) -> float:
        """Memory that a GPU reads and writes at least: weights once per pass, state once per update,
        activations out and back."""
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
    def within(self) -> float:
        """Bytes a GPU sends to others of its machine: two gathers of the weights, one scatter of gradients."""
        return 3 * (self.m - 1) / self.m * sum(self.sizes) * _HALF

    def between(self, compressed: bool) -> float:
        """Bytes a GPU sends to other machines: a ring all-reduce of its shard's gradients (Table 2)."""
        others = self.sizes[1] / self.m * _MASTER  # never compressed
        table = table2(self.config.width, self.r, self.m)["total size"]
        matrices = self.config.depth * (sum(table[1:]) if compressed else table[0]) * _HALF
        return 2 * (self.machines - 1) / self.machines * (matrices + others)

    def seconds(self, gpu: str, checkpointing: bool, compressed: bool) -> float:
        """A step: arithmetic, which hides the traffic within a machine (Figure 5), then that between machines."""
        kind = GPUS[gpu]
        work = self.flops(checkpointing) / self.gpus / (kind.rate * kind.share)
        return max(work, self.within / kind.within) + self.between(compressed) / kind.between
