"""Parallel sampling: the tokens of `generate.reference_tokens` in a fraction of the model's passes.

Each position has its own uniform number, so an image is the fixed point of a Jacobi iteration (Song et al. 2021; for
images, with random acceptance: Teng et al. 2024). Guess the next tokens, read them in one step of the cache
(`decoder.py`), and sample at each position. A sample is final if all tokens before it are: the samples that equal the
guesses, and the first that differs. The samples after it are the next guesses. So the tokens are those of sampling one
by one, apart from float rounding, which may flip a choice between two equally likely tokens.

The guess at a position without a sample is the token above it. Prompt tokens are guesses that are right. A batch reads
as many tokens in a step as pay by the guesses that were right so far (`window.py`). Sampling also sums the
log-probability of the tokens.

A batch serves requests that come at different times (continuous batching: Yu et al. 2022, Orca, §3.1): its rows have
their own caption, position, sampler and seed, and none depends on the others.

Shapes: N candidates of a request, M candidates in all, A unfinished ones, G of these with guidance, R = A + G rows of
the cache, W tokens of a step, B captions, T text positions, S image positions, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64
from torch import Tensor

from limner.attention.cache import KVCache
from limner.errors import UserError
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generate import sample_token
from limner.sampling.generation import CacheRow, Generation, Layout, Rows, TokenRequest, common_prompts
from limner.sampling.generation_config import Sampler
from limner.sampling.window import Window
from limner.text import PAD

__all__ = ["Batch", "Sampled", "check_finite", "generate"]

_FREE_FRACTION = 1 / 4  # of the rows of a cache; then they leave it, which copies the others


class Batch:
    """Candidates that share the steps of a model. Requests join and leave between any two steps.

    Args:
        rows: number of rows that are expected at the same time; with many, a step reads one token of each.
    """

    def __init__(self, decoder: TokenDecoder, rows: int = 1) -> None:
        self.decoder, (h, self._width) = decoder, decoder.config.grid
        self._length = h * self._width
        self._window = Window(rows, min(decoder.max_window, self._length - 1), decoder.step_tokens)
        self._generations: list[Generation] = []  # finished ones leave when requests join, or many rows are free
        self._cache_rows: list[CacheRow | None] = []  # None: of a request that has left
        self._free: list[bool] = []  # True for rows of the cache that requests which join may replace
        self._cache: KVCache | None = None
        self._first_logits: dict[Hashable, Tensor] = {}  # [1, V], by the texts of the cache

    @property
    def generations(self) -> list[Generation]:
        """The requests that are not finished."""
        return [generation for generation in self._generations if not generation.finished]

    @property
    def size(self) -> int:
        """Number of rows of the cache that are not free."""
        return self._free.count(False)

    @torch.inference_mode()
    def add(self, requests: Sequence[TokenRequest]) -> list[Generation]:
        """Read captions and prompts, and sample the first token of each candidate."""
        texts = [request.text for request in requests]
        empty = [torch.full_like(request.text, PAD) for request in requests if request.sampler.guided]
        cache, logits = self._read(torch.stack(texts + empty))
        prompts, nll = common_prompts(requests), logits.new_zeros(len(requests))
        for part in prompts.split(self._window.sizes[-1], 1) if prompts.numel() else ():
            logits = torch.cat([logits[:, -1:], self.decoder.step(cache, part)], 1)
            nll += F.cross_entropy(logits[: len(nll), :-1].mT, part[: len(nll)], reduction="none").sum(1)
        given = prompts.shape[1]
        new = [Generation(request, self._length, given, x) for request, x in zip(requests, nll, strict=True)]
        if given == self._length:
            return new
        sources = [(g, False) for g in new] + [(g, True) for g in new if g.request.sampler.guided]
        cache_rows = [CacheRow(g, i, empty) for g, empty in sources for i in range(len(g.request.candidates))]
        copies = torch.tensor([len(g.request.candidates) for g, _ in sources])
        rows = torch.arange(len(sources)).repeat_interleave(copies)
        self._join(cache.select(rows), cache_rows)
        self._generations += new
        self._arrange()
        layout = Layout(cache_rows, self._generations, logits.device)
        self._sample(layout, given, logits[:, -1:][rows.to(logits.device)])
        return new

    def _read(self, text: Int64[Tensor, "B T"]) -> tuple[KVCache, Float32[Tensor, "B 1 V"]]:
        """Return a cache with a row for each text, and the logits of its first token. Rows that have the text are
        copied; the model reads other texts."""
        texts = [tuple(row) for row in text.tolist()]
        rows = {self._cache.texts[x]: i for i, x in enumerate(self._cache.row_captions)} if self._cache else {}
        copied = {x: rows[x] for x in texts if x in rows}
        new = {x: i for i, x in enumerate(texts) if x not in rows}
        caches = list[KVCache]()
        if self._cache and copied:
            caches.append(self._cache.select(torch.tensor([*copied.values()])))
            caches[0].length = 0 * caches[0].length
        if new:
            cache, logits = self.decoder.prefill(text[[*new.values()]], self._window.sizes[-1])
            cache.texts = [*new]
            caches.append(cache)
            self._first_logits |= zip(new, logits, strict=True)
        for cache in caches[1:]:
            caches[0].put(cache, ())
        place = {x: i for i, x in enumerate([*copied, *new])}
        cache = caches[0].select(torch.tensor([place[x] for x in texts]))
        return cache, torch.stack([self._first_logits[x] for x in texts])

    def _join(self, cache: KVCache, rows: Sequence[CacheRow]) -> None:
        """Add rows of another cache, first in place of free ones."""
        free = [i for i, is_free in enumerate(self._free) if is_free]
        for i in free:
            self._cache_rows[i] = None
        slots = free[: len(rows)]
        if self._cache:
            self._cache.put(cache, slots)
        else:
            self._cache = cache
        for i, row in zip(slots, rows, strict=False):
            self._cache_rows[i] = row
        self._cache_rows += rows[len(slots) :]
        self._first_logits = {text: self._first_logits[text] for text in self._cache.texts}

    @torch.inference_mode()
    def remove(self, generation: Generation) -> None:
        """Stop sampling a request."""
        self._cache_rows = [None if row and row.generation is generation else row for row in self._cache_rows]
        self._release([row is None or free for row, free in zip(self._cache_rows, self._free, strict=True)])
        self._arrange()

    @torch.inference_mode()
    def step(self) -> None:
        """Read tokens of each row, and sample one token of each candidate or more."""
        if not self._cache:
            return
        tokens, first = self._next_input()
        logits = self.decoder.step(self._cache, tokens)
        self._sample(self._layout, first, logits)

    def _next_input(self) -> tuple[Int64[Tensor, "R W"], Int64[Tensor, "A 1"] | int]:
        """Return the last final token of each row and guesses of the tokens after it, and the position of the first
        token to sample."""
        assert self._cache
        rows, of_row = self._rows, self._layout.of_row
        if isinstance(self._cache.length, int):  # one token of each row, at the same position
            position = self._cache.length
            return rows.tokens[self._layout.candidates, position, None][of_row], position + 1
        window, candidates = self._window.size, self._layout.candidates[:, None]
        begin = (rows.final[candidates] - 1).clamp(max=self._length - 1 - window)
        positions = begin + torch.arange(window, device=begin.device)
        rows_above = ((positions - rows.last[candidates] - 1) // self._width + 1).clamp_min(0)
        above = rows.tokens[candidates, (positions - rows_above * self._width).clamp_min(0)]  # or the sample itself
        tokens = rows.tokens[candidates, positions].where(rows.fixed[candidates, positions], above)
        rows.tokens[candidates, positions] = tokens
        self._cache.length = begin[of_row]
        return tokens[of_row], begin + 1

    def _sample(self, layout: Layout, first: Int64[Tensor, "A 1"] | int, logits: Float32[Tensor, "R W V"]) -> None:
        """Sample the tokens from position `first`, given their logits."""
        rows, w, candidates = self._rows, logits.shape[1], layout.candidates
        targets = (first + torch.arange(w, device=logits.device)).expand(len(candidates), -1)
        at = candidates[:, None], targets
        caption, guided = layout.guided(logits)
        guess, before = rows.tokens[at], targets < rows.final[candidates, None]
        sampled = torch.empty_like(guess)
        for sampler, i in layout.samplers:
            sampled[i] = sample_token(sampler, guided[i].flatten(0, 1), rows.uniform[at][i].flatten()).view(-1, w)
        token = torch.where(rows.fixed[at] | before, guess, sampled)
        final = torch.ones_like(before)
        final[:, 1:] = (token == guess)[:, :-1].cumprod(1)
        gained = final & ~before
        nll = F.cross_entropy(caption.flatten(0, 1), token.flatten(), reduction="none").view_as(token)
        rows.nll[candidates] += (nll * gained).sum(1)
        rows.finite[candidates] &= (guided.sum(-1).isfinite() | ~final).all(1)
        rows.tokens[at] = token
        rows.final[candidates] = targets[:, 0] + final.sum(1)
        rows.last[candidates] = targets[:, -1]
        if w == 1:
            for generation in layout.generations:
                generation.position = min(generation.position + 1, self._length)
            self._window.update([1], 1, len(self._cache_rows))
            free = [row is None or row.generation.finished for row in self._cache_rows]
        else:  # a GPU waits here
            self._window.update([n for n in gained.sum(1).tolist() if n], w, len(self._cache_rows))
            for generation in layout.generations:
                generation.position = int(generation.rows.final.min())
            finished = (rows.final[candidates] == self._length)[layout.of_row].tolist()  # of all rows
            free = [row is None or done for row, done in zip(self._cache_rows, finished, strict=True)]
        self._release(free)

    def _release(self, free: list[bool]) -> None:
        """Let requests that join replace rows. Many free rows leave the cache."""
        self._free = free
        if sum(free) >= _FREE_FRACTION * len(free):
            kept = [i for i, is_free in enumerate(free) if not is_free]
            self._cache_rows, self._free = [self._cache_rows[i] for i in kept], [False] * len(kept)
            self._cache = self._cache.select(torch.tensor(kept)) if self._cache and kept else None
            self._arrange()

    def _arrange(self) -> None:
        """Hold the state of all requests with rows in common tensors, of which each request has a view."""
        present = {id(row.generation) for row in self._cache_rows if row}
        self._generations = [generation for generation in self._generations if id(generation) in present]
        if not self._generations:
            return
        sizes = [len(generation.request.candidates) for generation in self._generations]
        self._rows = Rows(*map(torch.cat, zip(*(generation.rows for generation in self._generations), strict=True)))
        views = zip(*(x.split(sizes) for x in self._rows), strict=True)
        for generation, rows in zip(self._generations, views, strict=True):
            generation.rows = Rows(*rows)
        self._layout = Layout(self._cache_rows, self._generations, self._rows.final.device)


class Sampled(NamedTuple):
    """Tokens int64 [B, N, S], and their log-probability given the caption, in nats per token, fp32 [B, N]."""

    tokens: Int64[Tensor, "B N S"]
    log_likelihood: Float32[Tensor, "B N"]


def generate(
    decoder: TokenDecoder,
    text: Int64[Tensor, "B T"],
    candidates: range,
    sampler: Sampler,
    *,
    seed: int = 0,
    prompt_tokens: Int64[Tensor, "B S"] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Sampled:
    """Sample candidates of captions; `TokenRequest` explains the arguments.

    `progress` is called with the number of positions that all rows finished since the last call. Raises `UserError` if
    a logit is not finite.
    """
    prompts = [None] * len(text) if prompt_tokens is None else prompt_tokens
    requests = [
        TokenRequest(text=row, candidates=candidates, sampler=sampler, seed=seed, prompt_tokens=prompt)
        for row, prompt in zip(text, prompts, strict=True)
    ]
    batch, before = Batch(decoder, sum(request.rows for request in requests)), 0
    generations = batch.add(requests)
    while True:
        position = min(generation.position for generation in generations)
        if progress and position > before:
            progress(position - before)
        before = position
        if not batch.generations:
            break
        batch.step()
    check_finite(generations)
    tokens, likelihood = ([getattr(g, name) for g in generations] for name in ("tokens", "log_likelihood"))
    return Sampled(torch.stack(tokens), torch.stack(likelihood))


def check_finite(generations: Sequence[Generation]) -> None:
    """Raise `UserError` if a logit was not finite. Waits for a GPU."""
    if not all(bool(generation.rows.finite.all()) for generation in generations):
        raise UserError(
            "the logits of the prior are not finite, so its weights are damaged or have diverged: use another copy"
        )
