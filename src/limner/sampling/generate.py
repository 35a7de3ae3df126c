"""Sampling of image tokens from the prior, one position after the other (Ramesh et al. 2021, §2.6; t = 1).

`reference_tokens` is the method. `parallel.py` samples the same tokens with a cache, several positions in one pass. The
module handles tokens only: a model returns logits, `sample_token` turns them into tokens. Each candidate has one
uniform number for each position, generated from its own seed, and a token is the inverse of the cumulative
distribution at that number. So candidate i of a caption does not depend on its batch. Guidance changes logits and
prompt tokens replace samples, with the same uniform numbers.

Shapes: B captions, N candidates of each, M rows, T text positions, S image positions, V image vocabulary.
"""

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from limner.models.transformer import Transformer
from limner.numerics.seeding import candidate_seed
from limner.sampling.generation_config import UNSET, Sampler
from limner.text import PAD

__all__ = ["candidate_noise", "reference_tokens", "sample_token"]


@torch.inference_mode()
def reference_tokens(
    model: Transformer,
    text: Int64[Tensor, "B T"],
    sampler: Sampler,
    uniform: Float32[Tensor, "B S"],
    prompt_tokens: Int64[Tensor, "B S"],
) -> Int64[Tensor, "B S"]:
    """Sample one candidate of each caption in the plainest way; `parallel.py` samples the same tokens.

    Shapes: text [B, T], uniform numbers in [0, 1) [B, S], prompt tokens [B, S], `UNSET` where to sample -> [B, S].
    """
    tokens = prompt_tokens.clamp_min(0)  # a position sees earlier ones only, so that later ones may have any token
    for s in range(tokens.shape[1]):
        logits = model(text, tokens)[1][:, s]
        if sampler.guided:
            empty = model(torch.full_like(text, PAD), tokens)[1][:, s]
            logits = empty + sampler.guidance * (logits - empty)
        sampled = sample_token(sampler, logits, uniform[:, s])
        tokens[:, s] = torch.where(prompt_tokens[:, s] == UNSET, sampled, prompt_tokens[:, s])
    return tokens


def sample_token(sampler: Sampler, logits: Float[Tensor, "M V"], uniform: Float32[Tensor, " M"]) -> Int64[Tensor, " M"]:
    """Sample tokens [M] from fp32 logits [M, V], with uniform numbers in [0, 1), [M]."""
    if sampler.temperature == 0:
        return logits.argmax(-1)
    if sampler.temperature not in (1, None):
        logits = logits / sampler.temperature
    p = logits.softmax(-1)
    if sampler.top_k is not None or sampler.top_p is not None:
        p = _truncated(p, sampler.top_k, sampler.top_p)
    cdf = p.cumsum_(-1)
    mass = cdf[:, -1:]
    target = (uniform[:, None] * mass).minimum(mass.nextafter(torch.zeros_like(mass)))  # below 1 despite rounding
    token = torch.searchsorted(cdf, target, right=True).squeeze(1)
    return token.clamp(max=cdf.shape[1] - 1)  # NaN logits give an index beyond the vocabulary


def _truncated(p: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Set unlikely tokens of p [M, V] to 0, without renormalizing.

    Keeps the `top_k` likeliest tokens, and of these the smallest set, likeliest first, with at least the share `top_p`.
    """
    falling, tokens = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        falling[:, top_k:] = 0
    if top_p is not None:  # keep the likeliest token, and others if the mass before them is below top_p
        kept = falling.cumsum(-1) - falling < top_p * falling.sum(-1, keepdim=True)
        falling[:, 1:] *= kept[:, 1:]
    return torch.zeros_like(p).scatter_(1, tokens, falling)


def candidate_noise(seed: int, candidates: range, length: int) -> Float32[Tensor, "N {length}"]:
    """Uniform numbers in [0, 1), one row of `length` for each candidate, determined by (seed, candidate)."""
    rows = []
    for i in candidates:
        generator = torch.Generator().manual_seed(candidate_seed(seed, i))
        rows.append(torch.rand(length, generator=generator))
    return torch.stack(rows)
