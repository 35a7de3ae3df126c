"""Drawing tokens from the prior, one position after the other (Ramesh et al. 2021, §2.6; t = 1).

Token-only: a function gives logits, this file turns them into choices. Each candidate owns one uniform
number for each position, drawn from its own seed, and a token is the inverse of the distribution
function at that number. So candidate i of a caption is the same whatever the batch around it. Guidance
and given tokens change the logits or replace choices; the numbers stay.

Shapes: B captions, N candidates, T text positions, S image positions, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from limner.layers.cache import Store
from limner.sampling.options import Sampler
from limner.sampling.recorded import Decoder
from limner.text import PAD

FREE = -1  # marks a position to draw


def choose(sampler: Sampler, logits: Tensor, uniform: Tensor) -> Tensor:
    """fp32 [M, V] and numbers in [0, 1) [M] -> tokens [M]."""
    if sampler.temperature == 0:
        return logits.argmax(-1)
    if sampler.temperature != 1:
        logits = logits / sampler.temperature
    p = logits.softmax(-1)
    if sampler.top_k is not None or sampler.top_p is not None:
        p = _filtered(p, sampler.top_k, sampler.top_p)
    cdf = p.cumsum_(-1)
    mass = cdf[:, -1:]
    at = (uniform[:, None] * mass).minimum(mass.nextafter(torch.zeros_like(mass)))  # rounding must not reach 1
    return torch.searchsorted(cdf, at, right=True).squeeze(1)


def _filtered(p: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Probabilities [M, V], of whatever sum, with those that are not kept set to 0: the `top_k` likeliest are, then
    the smallest set of these, likeliest first, whose mass reaches `top_p` of theirs."""
    falling, tokens = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        falling[:, top_k:] = 0
    if top_p is not None:  # a token stays if the mass before it has not reached p, and the likeliest does
        stays = falling.cumsum(-1) - falling < top_p * falling.sum(-1, keepdim=True)
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
    store: type[Store] = Store,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[Tensor, int], None] | None = None,
) -> Tensor:
    """Draw the given candidates of every caption.

    Args:
        text: int64 [B, T]; each caption is read once and shared by its candidates.
        candidates: their numbers; `range(32, 64)` continues where `range(32)` ended.
        sampler: its guidance is classifier-free (Ho & Salimans 2022): logits go that far from those without a
            caption, `empty + guidance * (caption - empty)`; 1 is none, and None is none here. The model must have
            been trained with captions dropped.
        given: int64 [B, S], image tokens that are fixed, `FREE` where to draw. Top rows prime the
            model (§2.6, Figure 14); fixed tokens anywhere, drawn around in raster order, inpaint.
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
    guidance = sampler.guidance
    guided = guidance not in (None, 1)
    tokens = given.repeat_interleave(n, 0)  # [B * N, S]
    cache, logits = model.prefill(torch.cat([text, torch.full_like(text, PAD)]) if guided else text, store)
    for position in range(h * w):
        if position == primed:
            cache, logits = cache.expand(n), logits.repeat_interleave(n, 0)
        if position >= primed:
            if guided:
                caption, empty = logits.chunk(2)
                logits = empty + guidance * (caption - empty)
            drawn = choose(sampler, logits, uniform[:, position])
            tokens[:, position] = torch.where(tokens[:, position] == FREE, drawn, tokens[:, position])
        if position + 1 < h * w:
            token = tokens[:, position] if position >= primed else given[:, position]
            logits = model.step(cache, token.repeat(2) if guided else token)
        if progress:
            progress(position + 1, h * w)
        if watch and (position + 1) % w == 0:
            watch(tokens.unflatten(0, (b, n)), (position + 1) // w)
    return tokens.unflatten(0, (b, n))
