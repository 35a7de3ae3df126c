"""Drawing tokens from the prior, one position after the other (Ramesh et al. 2021, §2.6; t = 1).

Token-only: a function gives logits, this file turns them into choices. Each candidate has one uniform
number for each position, drawn from its own seed, and a token is the inverse of the distribution
function at that number. So candidate i of a caption is the same whatever the batch around it. Guidance
and given tokens change the logits or replace choices; the numbers stay. What the logits say of each token is
added up on the way: how likely the finished picture is.

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

from limner.errors import UserError
from limner.layers.cache import Store, Together
from limner.sampling.cuda_graph import TokenDecoder
from limner.sampling.generation_config import Sampler
from limner.text import PAD

FREE = -1  # marks a position to draw


def choose(sampler: Sampler, logits: Float[Tensor, "M V"], uniform: Float32[Tensor, " M"]) -> Int64[Tensor, " M"]:
    """fp32 [M, V] and numbers in [0, 1) [M] -> tokens [M]."""
    if sampler.temperature == 0:
        return logits.argmax(-1)
    if sampler.temperature not in (1, None):
        logits = logits / sampler.temperature
    p = logits.softmax(-1)
    if sampler.top_k is not None or sampler.top_p is not None:
        p = _filtered(p, sampler.top_k, sampler.top_p)
    cdf = p.cumsum_(-1)
    mass = cdf[:, -1:]
    at = (uniform[:, None] * mass).minimum(mass.nextafter(torch.zeros_like(mass)))  # rounding must not reach 1
    token = torch.searchsorted(cdf, at, right=True).squeeze(1)
    return token.clamp(max=cdf.shape[1] - 1)  # of logits that are no numbers, it lies beyond the last one


def _filtered(p: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Probabilities [M, V] that need not sum to 1, with the unlikely ones set to 0. The `top_k` likeliest are kept, and
    of these the smallest set, likeliest first, whose mass reaches the share `top_p`."""
    falling, tokens = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        falling[:, top_k:] = 0
    if top_p is not None:  # a token stays if the mass before it has not reached p, and the likeliest does
        stays = falling.cumsum(-1) - falling < top_p * falling.sum(-1, keepdim=True)
        falling[:, 1:] *= stays[:, 1:]
    return torch.zeros_like(p).scatter_(1, tokens, falling)


def uniforms(seed: int, candidates: range, length: int) -> Float32[Tensor, "N {length}"]:
    """One row of `length` numbers in [0, 1) for each candidate, fixed by (seed, candidate)."""
    rows = []
    for i in candidates:  # of its seed the generator reads 32 bits, into which those above are mixed here
        generator = torch.Generator().manual_seed((seed * 1_000_003 + (seed >> 32) * 2_654_435_769 + i) % 2**32)
        rows.append(torch.rand(length, generator=generator))
    return torch.stack(rows)


class Rows:
    """Candidates of captions that joined a generation together, and so are at one position.

    They share work: each caption is read once, given tokens before the first one to draw are read once for each
    caption, and a step reads the keys and values of a caption once for all its candidates.
    """

    def __init__(
        self,
        model: TokenDecoder,
        text: Int64[Tensor, "B T"],
        candidates: range,
        sampler: Sampler,
        seed: int,
        given: Int64[Tensor, "B S"] | None,
        store: type[Store],
    ) -> None:
        b, n, length = len(text), len(candidates), prod(model.config.grid)
        self.sampler, self.guidance = sampler, 1.0 if sampler.guidance is None else sampler.guidance
        self.guided = self.guidance != 1
        self.captions, self.n = b, n
        given = torch.full((b, length), FREE, device=text.device) if given is None else given
        self.position, self.primed = 0, int((given != FREE).all(0).long().cumprod(0).sum())
        self._tokens = given.repeat_interleave(n, 0)  # [B * N, S]
        self._uniform = uniforms(seed, candidates, length).repeat(b, 1).to(text.device)  # [B * N, S]
        both = torch.cat([text, torch.full_like(text, PAD)]) if self.guided else text
        self.cache, self.logits = model.prefill(both, store)
        self._surprise = torch.zeros(b, device=text.device)  # fp32 [B], or [B * N] once candidates differ
        self.finite = torch.ones((), dtype=torch.bool, device=text.device)  # of all logits; reading it makes a GPU wait

    @property
    def tokens(self) -> Int64[Tensor, "B N S"]:
        """What is drawn so far, int64 [B, N, S]; `FREE` where nothing is."""
        return self._tokens.unflatten(0, (self.captions, -1))

    @property
    def likelihood(self) -> Float32[Tensor, "B N"]:
        """Log-probability of the tokens so far given the caption, in nats per token, fp32 [B, N]. It is that of the
        model itself: a sampler's temperature and guidance are not in it."""
        rows = self.captions * self.n // len(self._surprise)
        return -self._surprise.repeat_interleave(rows).unflatten(0, (self.captions, -1)) / max(1, self.position)

    @property
    def done(self) -> bool:
        return self.position == self._tokens.shape[1]

    def draw(self) -> Int64[Tensor, " M"]:
        """Each row's token at the next position, int64 [M], as the model is to read them."""
        now = self._tokens[:, self.position]
        if self.position == self.primed:  # until here, candidates were alike
            self.cache, self.logits = self.cache.expand(self.n), self.logits.repeat_interleave(self.n, 0)
            self._surprise = self._surprise.repeat_interleave(self.n)
        caption, empty = self.logits.chunk(2) if self.guided else (self.logits, None)
        if self.position < self.primed:
            now = now[:: self.n]
        else:
            logits = caption if empty is None else empty + self.guidance * (caption - empty)
            self.finite = self.finite & logits.isfinite().all()
            drawn = choose(self.sampler, logits, self._uniform[:, self.position])
            self._tokens[:, self.position] = now = torch.where(now == FREE, drawn, now)
        self._surprise += F.cross_entropy(caption, now, reduction="none")
        self.position += 1
        return now.repeat(2) if self.guided else now

    def keep(self, which: Sequence[int]) -> None:
        """Keep only some candidates of each caption, by their place among the present ones."""
        stay = (self.n * torch.arange(self.captions)[:, None] + torch.tensor(which)).flatten().to(self._tokens.device)
        if self.position > self.primed:
            both = torch.cat([stay, stay + len(self._tokens)]) if self.guided else stay
            self.cache, self.logits, self._surprise = self.cache.keep(both), self.logits[both], self._surprise[stay]
        self._tokens, self._uniform, self.n = self._tokens[stay], self._uniform[stay], len(which)


class Generation:
    """Drawings under way. Rows join and leave between tokens, and no row's tokens depend on its company.

    A step reads the model's weights once for all rows, wherever each of them is in its picture. Only attention is
    computed separately for rows that joined at different times (selective batching: Yu et al. 2022, Orca, §3.2).
    """

    def __init__(self, model: TokenDecoder, store: type[Store] = Store) -> None:
        self.model, self.store = model, store
        self.rows: list[Rows] = []

    @torch.inference_mode()
    def join(
        self,
        text: Int64[Tensor, "B T"],
        candidates: range,
        sampler: Sampler,
        *,
        seed: int = 0,
        given: Int64[Tensor, "B S"] | None = None,
    ) -> Rows:
        """Begin with the given candidates of every caption.

        Args:
            text: int64 [B, T].
            candidates: their numbers; `range(32, 64)` continues where `range(32)` ended.
            sampler: its guidance is classifier-free (Ho & Salimans 2022): the logits are
                `empty + guidance * (caption - empty)`. 1 or None is no guidance. Other values need a model that was
                trained with captions dropped.
            given: int64 [B, S], image tokens that are fixed, `FREE` where to draw. Top rows prime the
                model (§2.6, Figure 14); fixed tokens anywhere, drawn around in raster order, inpaint.
        """
        rows = Rows(self.model, text, candidates, sampler, seed, given, self.store)
        self.rows.append(rows)
        return rows

    def leave(self, rows: Rows) -> None:
        """Draw no more of these."""
        self.rows.remove(rows)

    @torch.inference_mode()
    def step(self) -> None:
        """Draw one token of each row. Rows that are done leave."""
        tokens = {rows: rows.draw() for rows in self.rows}
        self.rows = [rows for rows in self.rows if not rows.done]
        if len(self.rows) == 1:
            (rows,) = self.rows
            rows.logits = self.model.step(rows.cache, tokens[rows])
        elif self.rows:
            parts = [tokens[rows] for rows in self.rows]
            logits = self.model.step(Together([rows.cache for rows in self.rows]), torch.cat(parts))
            for rows, part in zip(self.rows, logits.split([len(part) for part in parts]), strict=True):
                rows.logits = part


def generate(
    model: TokenDecoder,
    text: Int64[Tensor, "B T"],
    candidates: range,
    sampler: Sampler,
    *,
    seed: int = 0,
    given: Int64[Tensor, "B S"] | None = None,
    store: type[Store] = Store,
    progress: Callable[[int], object] | None = None,
    watch: Callable[[Tensor, int], None] | None = None,
) -> Rows:
    """Draw the given candidates of every caption, which are then `done`: their `tokens` and `likelihood`.
    `Generation.join` explains the arguments but these:

    Args:
        store: how keys and values are kept; `Int8Store` takes half the memory of bf16.
        progress: called with 1 after each position.
        watch: called with the tokens so far [B, N, S] and the number of rows of the grid done, after each.

    Raises `UserError` if a logit is not finite.
    """
    w, generation = model.config.grid[1], Generation(model, store)
    rows = generation.join(text, candidates, sampler, seed=seed, given=given)
    while not rows.done:
        generation.step()
        if progress:
            progress(1)
        if watch and rows.position % w == 0:
            watch(rows.tokens, rows.position // w)
    if not rows.finite:
        raise UserError(
            "the logits of the prior are not finite, so its weights are damaged or have diverged: take another copy"
        )
    return rows
