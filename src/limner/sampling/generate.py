"""Drawing tokens from the prior, one position after the other (Ramesh et al. 2021, §2.6; t = 1).

Token-only: a function gives logits, this file turns them into choices. Each candidate owns one uniform
number for each position, drawn from its own seed, and a token is the inverse of the distribution
function at that number. So candidate i of a caption is the same whatever the batch around it. Guidance
and given tokens change the logits or replace choices; the numbers stay.

Shapes: B captions, N candidates, T text positions, S image positions, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from limner.config import Checked, OutOfRange, Range
from limner.layers.cache import Store
from limner.sampling.recorded import Decoder
from limner.text import PAD

FREE = -1  # marks a position to draw


@dataclass(frozen=True, kw_only=True)
class Sampler(Checked):
    """How a token is chosen from image logits.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; None keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches p.
    """

    temperature: Annotated[float, Range(0, 100)] = 1.0
    top_k: Annotated[int | None, Range(1, 2**24)] = None
    top_p: Annotated[float | None, Range(above=0, most=1)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.temperature < 0.01:
            raise OutOfRange("temperature", f"must be 0 (the likeliest) or at least 0.01, not {self.temperature}")

    def __call__(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """fp32 [M, V] and numbers in [0, 1) [M] -> tokens [M]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.temperature != 1:
            logits = logits / self.temperature
        p = logits.softmax(-1)
        if self.top_k is not None or self.top_p is not None:
            p = self._filtered(p)
        cdf = p.cumsum_(-1)
        mass = cdf[:, -1:]
        at = (uniform[:, None] * mass).minimum(mass.nextafter(torch.zeros_like(mass)))  # rounding must not reach 1
        return torch.searchsorted(cdf, at, right=True).squeeze(1)

    def _filtered(self, p: Tensor) -> Tensor:
        """Probabilities [M, V], of whatever sum, with those that are not kept set to 0."""
        falling, tokens = p.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            falling[:, self.top_k :] = 0
        if self.top_p is not None:  # a token stays if the mass before it has not reached p, and the likeliest does
            stays = falling.cumsum(-1) - falling < self.top_p * falling.sum(-1, keepdim=True)
            falling[:, 1:] *= stays[:, 1:]
        return torch.zeros_like(p).scatter_(1, tokens, falling)


def uniforms(seed: int, candidates: range, length: int) -> Tensor:
    """One row of `length` numbers in [0, 1) for each candidate, fixed by (seed, candidate)."""
    rows = []
    for i in candidates:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + i) % 2**63)
        rows.append(torch.rand(length, generator=generator))
    return torch.stack(rows)


@torch.inference_mode()
def generate(
    model: Decoder,
    text: Tensor,
    candidates: range,
    sampler: Sampler,
    *,
    seed: int = 0,
    given: Tensor | None = None,
    guidance: float = 1.0,
    store: type[Store] = Store,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[Tensor, int], None] | None = None,
) -> Tensor:
    """Draw the given candidates of every caption.

    Args:
        text: int64 [B, T]; each caption is read once and shared by its candidates.
        candidates: their numbers; `range(32, 64)` continues where `range(32)` ended.
        given: int64 [B, S], image tokens that are fixed, `FREE` where to draw. Top rows prime the
            model (§2.6, Figure 14); fixed tokens anywhere, drawn around in raster order, inpaint.
        guidance: classifier-free (Ho & Salimans 2022): logits go that far from those without a
            caption, `empty + guidance * (caption - empty)`; 1 is none. The model must have been
            trained with captions dropped.
        store: how keys and values are kept; `Int8Store` takes half the memory of bf16.
        progress: called with (positions done, S).
        watch: called with the tokens so far [B, N, S] and the number of rows done, after each row.

    Returns:
        int64 [B, N, S].
    """
    b, n = len(text), len(candidates)
    h, w = model.config.grid
    uniform = uniforms(seed, candidates, h * w).repeat(b, 1).to(text.device)  # [B * N, S]
    given = torch.full((b, h * w), FREE, device=text.device) if given is None else given
    primed = int((given != FREE).all(0).long().cumprod(0).sum())  # until there, candidates are alike
    guided = guidance != 1
    tokens = given.repeat_interleave(n, 0)  # [B * N, S]
    cache, logits = model.prefill(torch.cat([text, torch.full_like(text, PAD)]) if guided else text, store)
    for position in range(h * w):
        if position == primed:
            cache, logits = cache.expand(n), logits.repeat_interleave(n, 0)
        if position >= primed:
            if guided:
                caption, empty = logits.chunk(2)
                logits = empty + guidance * (caption - empty)
            drawn = sampler(logits, uniform[:, position])
            tokens[:, position] = torch.where(tokens[:, position] == FREE, drawn, tokens[:, position])
        if position + 1 < h * w:
            token = tokens[:, position] if position >= primed else given[:, position]
            logits = model.step(cache, token.repeat(2) if guided else token)
        if progress:
            progress(position + 1, h * w)
        if watch and (position + 1) % w == 0:
            watch(tokens.unflatten(0, (b, n)), (position + 1) // w)
    return tokens.unflatten(0, (b, n))
