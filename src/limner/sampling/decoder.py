"""Decoding of a prior with a cache: a step reads one token instead of all tokens so far.

Its logits equal those of `Transformer.forward` at every position; only the work differs.

Shapes: B captions, M rows, T text positions, V image vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from limner.attention.cache import KVCache, KVStore, LayerKVCache, RaggedBatch
from limner.attention.patterns import Pattern
from limner.attention.sparse import DenseAttention
from limner.models.transformer import Transformer, TransformerConfig
from limner.numerics.precision import upcast

__all__ = ["TokenDecoder"]


class TokenDecoder:
    """Decoder of a prior, one image token of each row at a time."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    def prefill(
        self, text: Int64[Tensor, "B T"], store: type[KVStore] = KVStore
    ) -> tuple[KVCache, Float[Tensor, "B V"]]:
        """Encode the captions: text [B, T] -> a cache with one candidate each, and logits [B, V] of image_0.

        `store` is the storage format of the candidates' keys and values.
        """
        x = self.model.embed.prefix(text)
        causal = DenseAttention(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril())
        layers: list[LayerKVCache] = []

        def attend_and_cache(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layers.append(LayerKVCache.from_prefix(pattern, k.contiguous(), v.contiguous(), store))
            return causal(q, k, v)

        x = self.model.run(x, attention_fns=[partial(attend_and_cache, pattern) for pattern in self.config.patterns])
        return KVCache(layers), self._logits(x)

    def step(self, cache: KVCache | RaggedBatch, token: Int64[Tensor, " M"]) -> Float[Tensor, "M V"]:
        """Append one image token per row, [M], and return the fp32 logits [M, V] of the next token."""
        x = self.model.embed.tokens(token[:, None], cache.length)
        x = self.model.run(x, attention_fns=cache.attention_fns())
        cache.advance()
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        head = self.model.head
        return upcast(head.image(head.norm(x[:, -1])))
