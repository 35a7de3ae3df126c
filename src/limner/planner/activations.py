"""Bytes of activations and temporary tensors of a micro-batch on one GPU.

Matrix products are in 16 bits, the identity path in 32. Shapes: B samples, N positions, D width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from limner.attention.patterns import Pattern
from limner.attention.sparse import SparseAttention, training_attention
from limner.models.transformer import TransformerConfig
from limner.objectives.cross_entropy import LOGITS_PER_CHUNK
from limner.planner.cost import FP32, HALF, num_positions


@lru_cache(maxsize=16)
def _attention_size(config: TransformerConfig, pattern: Pattern, device: str) -> tuple[bool, int, int, int]:
    """Return the size of an attention: sparse or not, weights and keys of one sequence, sequences per kernel call."""
    path = training_attention(pattern, config.text_len + 1)
    if isinstance(path, SparseAttention):
        return True, path.bias.numel(), path.bias.numel() // path.queries, path.sequences_per_part(device)
    n = num_positions(config)
    return False, n**2, n, 1 << 62


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that a micro-batch of `samples` takes.

    Args:
        copies: linear layers round weights to 16 bits and keep the copies for the backward pass.
        checkpointing: the backward pass recomputes one resblock at a time from its inputs.
        device: device type; on a CPU attention runs in smaller chunks.
    """

    config: TransformerConfig
    samples: int
    copies: bool
    checkpointing: bool
    device: str

    @property
    def _states(self) -> int:
        """B N D."""
        return self.samples * num_positions(self.config) * self.config.width

    def _resblocks(self, pattern: Pattern, copies: bool = True) -> tuple[int, int]:
        """Return the bytes that a layer's attention and MLP store in addition to their inputs, all in 16 bits: outputs
        of LayerNorm; q, k, v, weights and the output of attention; the MLP's hidden layer before and after GELU; copies
        of the matrices."""
        c = self.config
        keys = c.text_len + 1 if _attention_size(c, pattern, self.device)[0] else num_positions(c)
        weights = self.samples * c.heads * keys**2 * HALF
        values, matrix = self._states * HALF, copies * c.width**2 * HALF
        return (1 + 3 + 1) * values + weights + 4 * matrix, (1 + 8) * values + 8 * matrix

    @property
    def resblocks(self) -> list[int]:
        """Bytes that each resblock's forward pass leaves for the backward pass, first to last."""
        inputs = self._states * FP32
        if self.checkpointing:
            return [inputs] * (2 * self.config.depth)
        return [inputs + n for pattern in self.config.patterns for n in self._resblocks(pattern, self.copies)]

    @property
    def head_inputs(self) -> int:
        """Bytes of the head's input and of its gradient."""
        return 2 * self._states * FP32

    @property
    def stored(self) -> dict[str, int]:
        """Bytes that the forward pass leaves for the backward pass; for the head, its gradients."""
        c, name = self.config, "resblocks' inputs" if self.checkpointing else "layers"
        head = self.head_inputs + (c.text_vocab + c.image_vocab) * c.width * FP32
        return {name: sum(self.resblocks), "at the loss": head}

    @property
    def logits(self) -> int:
        """Bytes of a chunk of at most `LOGITS_PER_CHUNK` logits and log-probabilities."""
        vocab = max(self.config.text_vocab, self.config.image_vocab)
        count = self.samples * num_positions(self.config) * vocab
        return 2 * FP32 * min(LOGITS_PER_CHUNK, count)

    @property
    def workspace(self) -> int:
        """Temporary bytes of a block's backward pass, MLP first. With checkpointing each resblock is recomputed;
        otherwise the MLP frees its activations. Without copies of matrices, their gathered 16-bit weights or gradients
        take as much.

        The MLP has the gradient of the identity path twice in 32 bits, that of the hidden layer twice in 16. Then
        attention has gradients of q, k, v and its output in 16 bits, of the identity path twice in 32, and the input of
        the MLP is freed.
        """
        attention, mlp = map(max, zip(*map(self._resblocks, set(self.config.patterns)), strict=True))
        in_mlp = self._states * (2 * FP32 + 8 * HALF)
        in_attention = self._states * ((3 + 1) * HALF + 2 * FP32 - FP32) + self._attention_workspace
        if self.checkpointing:
            return max(mlp + in_mlp, attention + in_attention)
        return max(in_mlp, in_attention - mlp)

    @property
    def _attention_workspace(self) -> int:
        """Temporary bytes of attention's backward pass: scores, softmax and keys of all blocks in 32 bits, weights and
        keys of all blocks in 16."""
        c, sizes = self.config, []
        for pattern in set(c.patterns):
            _, weights, keys, at_once = _attention_size(c, pattern, self.device)
            each = weights * (2 * FP32 + HALF) + keys * (c.width // c.heads) * (FP32 + HALF)
            sizes.append(min(self.samples * c.heads, at_once) * each)
        return max(sizes)
