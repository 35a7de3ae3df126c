"""Sampling of image tokens from the prior, one position after the other (Ramesh et al. 2021, §2.6; t = 1).

`reference_tokens` is the method. `generate` samples the same tokens for many candidates, with a cache (`decoder.py`).
The module handles tokens only: a model returns logits, `sample_token` turns them into tokens. Each candidate has one
uniform number for each position, generated from its own seed, and a token is the inverse of the cumulative
distribution at that number. So candidate i of a caption does not depend on its batch. Guidance changes logits and
prompt tokens replace samples, with the same uniform numbers. Sampling also sums the log-probability of the tokens.

Shapes: B captions, N candidates of each, M = B * N rows (twice that with guidance), T text positions, S image
positions, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from limner.attention.cache import KVStore, RaggedBatch
from limner.errors import UserError
from limner.models.transformer import Transformer
from limner.numerics.seeding import candidate_seed
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generation_config import Sampler
from limner.text import PAD

__all__ = ["GenerationGroup", "Scheduler", "candidate_noise", "generate", "reference_tokens", "sample_token"]

UNSET = -1  # marks a position to sample


@torch.inference_mode()
def reference_tokens(
    model: Transformer,
    text: Int64[Tensor, "B T"],
    sampler: Sampler,
    uniform: Float32[Tensor, "B S"],
    prompt_tokens: Int64[Tensor, "B S"],
) -> Int64[Tensor, "B S"]:
    """Sample one candidate of each caption in the plainest way; `generate` samples the same tokens with a cache.

    Shapes: text [B, T], uniform numbers in [0, 1) [B, S], prompt tokens [B, S], `UNSET` where to sample -> [B, S].
    """
    tokens = prompt_tokens.clamp_min(0)  # a position sees earlier ones only, so that later ones may have any token
    for s in range(tokens.shape[1]):
        logits = model(text, tokens)[1][:, s]
        if sampler.guidance not in (1, None):
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


class GenerationGroup:
    """Candidates of captions that joined a scheduler together, and so are at one position.

    The group shares work. Each caption is read once. Prompt tokens before the first position to sample are read once
    for each caption. A step reads keys and values of a caption once for all its candidates.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        text: Int64[Tensor, "B T"],
        candidates: range,
        sampler: Sampler,
        seed: int,
        prompt_tokens: Int64[Tensor, "B S"] | None,
        store: type[KVStore],
    ) -> None:
        b, n, length = len(text), len(candidates), prod(decoder.config.grid)
        self.sampler, self.guidance = sampler, 1.0 if sampler.guidance is None else sampler.guidance
        self.guided = self.guidance != 1
        self.captions, self.n = b, n
        prompt = torch.full((b, length), UNSET, device=text.device) if prompt_tokens is None else prompt_tokens
        self.position, self.prompt_length = 0, int((prompt != UNSET).all(0).long().cumprod(0).sum())
        self._tokens = prompt.repeat_interleave(n, 0)  # [B * N, S]
        self._uniform = candidate_noise(seed, candidates, length).repeat(b, 1).to(text.device)  # [B * N, S]
        prefixes = torch.cat([text, torch.full_like(text, PAD)]) if self.guided else text
        self.cache, logits = decoder.prefill(prefixes, store)
        self.logits = logits[:, 0]
        self._nll = torch.zeros(b, device=text.device)  # fp32 [B], [B * N] after the prompt
        self.finite = torch.ones((), dtype=torch.bool, device=text.device)  # of all logits; reading synchronizes a GPU

    @property
    def tokens(self) -> Int64[Tensor, "B N S"]:
        """Tokens sampled so far, int64 [B, N, S], `UNSET` elsewhere."""
        return self._tokens.unflatten(0, (self.captions, -1))

    @property
    def log_likelihood(self) -> Float32[Tensor, "B N"]:
        """Log-probability of the tokens so far given the caption, in nats per token, fp32 [B, N], under the model
        itself: without temperature and guidance."""
        rows = self.captions * self.n // len(self._nll)
        return -self._nll.repeat_interleave(rows).unflatten(0, (self.captions, -1)) / max(1, self.position)

    @property
    def finished(self) -> bool:
        return self.position == self._tokens.shape[1]

    def sample_next(self) -> Int64[Tensor, " M"]:
        """Sample the token of each row at the next position: int64 [M], the input of the model's next step."""
        token = self._tokens[:, self.position]
        if self.position == self.prompt_length:  # candidates differ from here on
            self.cache, self.logits = self.cache.expand(self.n), self.logits.repeat_interleave(self.n, 0)
            self._nll = self._nll.repeat_interleave(self.n)
        caption, empty = self.logits.chunk(2) if self.guided else (self.logits, None)
        if self.position < self.prompt_length:
            token = token[:: self.n]
        else:
            logits = caption if empty is None else empty + self.guidance * (caption - empty)
            self.finite = self.finite & logits.isfinite().all()
            sampled = sample_token(self.sampler, logits, self._uniform[:, self.position])
            self._tokens[:, self.position] = token = torch.where(token == UNSET, sampled, token)
        self._nll += F.cross_entropy(caption, token, reduction="none")
        self.position += 1
        return token.repeat(2) if self.guided else token

    def select(self, candidates: Sequence[int]) -> None:
        """Drop all but some candidates of each caption, given by their index among the present ones."""
        offsets = self.n * torch.arange(self.captions)[:, None]
        rows = (offsets + torch.tensor(candidates)).flatten().to(self._tokens.device)
        if self.position > self.prompt_length:
            both = torch.cat([rows, rows + len(self._tokens)]) if self.guided else rows
            self.cache, self.logits, self._nll = self.cache.select(both), self.logits[both], self._nll[rows]
        self._tokens, self._uniform, self.n = self._tokens[rows], self._uniform[rows], len(candidates)


class Scheduler:
    """Continuous batching: groups join and leave between tokens, and no group's tokens depend on other groups.

    A step reads the model's weights once for all rows, at any position. Only attention is computed separately
    for groups that joined at different times (selective batching: Yu et al. 2022, Orca, §3.2).
    """

    def __init__(self, decoder: TokenDecoder, store: type[KVStore] = KVStore) -> None:
        self.decoder, self.store = decoder, store
        self.groups: list[GenerationGroup] = []

    @torch.inference_mode()
    def add(
        self,
        text: Int64[Tensor, "B T"],
        candidates: range,
        sampler: Sampler,
        *,
        seed: int = 0,
        prompt_tokens: Int64[Tensor, "B S"] | None = None,
    ) -> GenerationGroup:
        """Add candidates of captions as a group.

        Args:
            text: int64 [B, T].
            candidates: candidate numbers; `range(32, 64)` continues where `range(32)` ended.
            sampler: its guidance is classifier-free (Ho & Salimans 2022): the logits are
                `empty + guidance * (caption - empty)`. 1 or None turns guidance off. Other values need a model trained
                with caption dropout.
            prompt_tokens: int64 [B, S], fixed image tokens, `UNSET` where to sample. Top rows prime the model (§3.3,
                Figure 14). With fixed tokens elsewhere, sampling in raster order inpaints.
        """
        group = GenerationGroup(self.decoder, text, candidates, sampler, seed, prompt_tokens, self.store)
        self.groups.append(group)
        return group

    def remove(self, group: GenerationGroup) -> None:
        """Stop generating a group."""
        self.groups.remove(group)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one token of each row, and remove finished groups."""
        tokens = {group: group.sample_next() for group in self.groups}
        self.groups = [group for group in self.groups if not group.finished]
        if len(self.groups) == 1:
            (group,) = self.groups
            group.logits = self.decoder.step(group.cache, tokens[group][:, None])[:, 0]
        elif self.groups:
            parts = [tokens[group] for group in self.groups]
            logits = self.decoder.step(RaggedBatch([group.cache for group in self.groups]), torch.cat(parts)[:, None])[
                :, 0
            ]
            for group, part in zip(self.groups, logits.split([len(part) for part in parts]), strict=True):
                group.logits = part


def generate(
    decoder: TokenDecoder,
    text: Int64[Tensor, "B T"],
    candidates: range,
    sampler: Sampler,
    *,
    seed: int = 0,
    prompt_tokens: Int64[Tensor, "B S"] | None = None,
    store: type[KVStore] = KVStore,
    progress: Callable[[int], object] | None = None,
    on_preview: Callable[[Tensor, int], None] | None = None,
) -> GenerationGroup:
    """Generate candidates of captions; the finished group has their `tokens` and `log_likelihood`.

    `Scheduler.add` explains the other arguments.

    Args:
        store: storage of keys and values; `Int8KVStore` takes half the memory of bf16.
        progress: called with 1 after each position.
        on_preview: called with the tokens so far [B, N, S] and the number of finished grid rows, after each row.

    Raises `UserError` if a logit is not finite.
    """
    w, scheduler = decoder.config.grid[1], Scheduler(decoder, store)
    group = scheduler.add(text, candidates, sampler, seed=seed, prompt_tokens=prompt_tokens)
    while not group.finished:
        scheduler.step()
        if progress:
            progress(1)
        if on_preview and group.position % w == 0:
            on_preview(group.tokens, group.position // w)
    if not group.finite:
        raise UserError(
            "the logits of the prior are not finite, so its weights are damaged or have diverged: use another copy"
        )
    return group
