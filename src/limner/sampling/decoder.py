"""Decoding of a prior with a cache: a step reads one token instead of all tokens so far.

Its logits equal those of `Transformer.forward` at every position; only the work differs.

Shapes: B captions, M rows, W tokens of a step, T text positions, V image vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from limner.attention.cache import KVCache, LayerKVCache
from limner.attention.kv_store import KVStore
from limner.attention.patterns import Pattern
from limner.attention.sparse import DenseAttention
from limner.models.transformer import Transformer, TransformerConfig
from limner.numerics.precision import upcast
from limner.sampling.window import BF16_STEP_TOKENS, STEP_TOKENS

__all__ = ["TokenDecoder"]


class TokenDecoder:
    """Decoder of a prior. A step reads the next token of each row, or several tokens.

    Args:
        store: storage of candidates' keys and values; `Int8KVStore` takes half the memory of bf16.
    """

    max_window = 16  # tokens of a row that samplers may read in a step

    def __init__(self, model: Transformer, store: type[KVStore] = KVStore) -> None:
        self.model, self.store = model, store

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, whose computation takes as long as its other work (`Window`)."""
        return BF16_STEP_TOKENS if self.model.embed.image.weight.dtype == torch.bfloat16 else STEP_TOKENS

    def prefill(self, text: Int64[Tensor, "B _"], window: int = 1) -> tuple[KVCache, Float[Tensor, "B 1 V"]]:
        """Encode the captions: text [B, T], or [B, T + S] with the tokens of a given picture, -> a cache with one
        candidate each, and logits [B, 1, V] of image_0.

        Steps with the cache may read up to `window` tokens of each row. With one, all rows are at one position.
        """
        text, picture = text[:, : self.config.text_len], text[:, self.config.text_len :]
        x, added = self.model.embed.prefix(text), None
        if picture.shape[1]:
            given = self.model.embed.given(picture)
            x[:, -1] += given[:, 0]
            added = F.pad(given[:, None, 1:], (0, 0, 0, 1))
        causal = DenseAttention(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril())
        layers: list[LayerKVCache] = []

        def attend_and_cache(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layers.append(LayerKVCache.from_prefix(pattern, k.contiguous(), v.contiguous(), self.store, window))
            return causal(q, k, v)

        x = self.model.run(x, attention_fns=[partial(attend_and_cache, pattern) for pattern in self.config.patterns])
        length = 0 if window == 1 else torch.zeros(len(text), 1, dtype=torch.long, device=text.device)
        return KVCache(layers, length, added=added), self._logits(x[:, -1:])

    def step(self, cache: KVCache, tokens: Int64[Tensor, "M W"]) -> Float[Tensor, "M W V"]:
        """Append image tokens to each row, [M, W], and return the fp32 logits [M, W, V] of the token after each.

        Several tokens need a cache with a length for each row. Setting back the length drops tokens.
        """
        x = self.model.embed.tokens(tokens, cache.length)
        if cache.added is not None:
            x = x + cache.added_at(tokens.shape[1])
        x = self.model.run(x, attention_fns=cache.attention_fns())
        cache.advance(tokens.shape[1])
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        head = self.model.head
        return upcast(head.image(head.norm(x)))
