"""Parallel sampling: the tokens of `generate.reference_tokens` in a fraction of the model's passes.

Each position has its own uniform number, so an image is the fixed point of a Jacobi iteration (Song et al. 2021; for
images, with random acceptance: Teng et al. 2024). Guess the next tokens, read them in one step of the cache
(`decoder.py`), and sample at each position. A sample is final if all tokens before it are: the samples that equal the
guesses, and the first that differs. The samples after it are the next guesses. So the tokens are those of sampling one
by one, apart from float rounding, which may flip a choice between two equally likely tokens.

The guess at a position without a sample is the token above it. Prompt tokens are guesses that are right. A group reads
as many tokens in a step as pay by the guesses that were right so far (`window.py`). Sampling also sums the
log-probability of the tokens.

Shapes: B captions, N candidates of each, M = B * N rows (twice that with guidance), W tokens of a step, T text
positions, S image positions, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64
from torch import Tensor

from limner.attention.cache import RaggedBatch
from limner.errors import UserError
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generate import UNSET, candidate_noise, sample_token
from limner.sampling.generation_config import Sampler
from limner.sampling.window import Window
from limner.text import PAD

__all__ = ["GenerationGroup", "Scheduler", "generate"]


class GenerationGroup:
    """Candidates of captions that joined a scheduler together.

    The group shares work. Each caption is read once, with the prompt tokens before the first position to sample. A step
    reads keys and values of a caption once for all its candidates, and some tokens of each.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        text: Int64[Tensor, "B T"],
        candidates: range,
        sampler: Sampler,
        seed: int,
        prompt_tokens: Int64[Tensor, "B S"] | None,
    ) -> None:
        b, n, (h, self._width) = len(text), len(candidates), decoder.config.grid
        self.sampler, self.guidance = sampler, 1.0 if sampler.guidance is None else sampler.guidance
        self.guided = self.guidance != 1
        prefixes = torch.cat([text, torch.full_like(text, PAD)]) if self.guided else text
        self.captions, self.n = b, n
        self._window = Window(len(prefixes) * n, min(decoder.max_window, h * self._width - 1))
        limit = self._window.size
        prompt = text.new_full((b, h * self._width), UNSET) if prompt_tokens is None else prompt_tokens
        self._tokens = prompt.repeat_interleave(n, 0)  # [M, S]; after the final tokens, guesses
        self._fixed = self._tokens != UNSET
        self._uniform = candidate_noise(seed, candidates, h * self._width).repeat(b, 1).to(text.device)  # [M, S]
        cache, logits = decoder.prefill(prefixes, limit)
        nll = torch.zeros(b, device=text.device)
        common = prompt[:, : int((prompt != UNSET).all(0).long().cumprod(0).sum())]
        for begin in range(0, common.shape[1], limit):
            part = common[:, begin : begin + limit]
            logits = torch.cat([logits[:, -1:], decoder.step(cache, self._twice(part))], 1)
            nll += F.cross_entropy(logits[:b, :-1].mT, part, reduction="none").sum(1)
        self.cache, self.logits = cache.expand(n), logits[:, -1:].repeat_interleave(n, 0)
        self._nll = nll.repeat_interleave(n)  # fp32 [M]
        self._first: int | Tensor = common.shape[1]  # position that the first of the logits predict; of each row [M, 1]
        self._final = self._first  # number of final tokens; of each row [M, 1]
        self.finite = torch.ones((), dtype=torch.bool, device=text.device)  # of all logits; reading synchronizes a GPU

    @property
    def window(self) -> int:
        """Number of tokens of each row that the next step should read."""
        return self._window.size

    @property
    def position(self) -> int:
        """Number of final tokens that every row has."""
        return int(self._final.min()) if isinstance(self._final, Tensor) else self._final

    @property
    def tokens(self) -> Int64[Tensor, "B N S"]:
        """Final tokens, int64 [B, N, S], `UNSET` elsewhere."""
        final = torch.arange(self._tokens.shape[1], device=self._tokens.device) < self._final
        return self._tokens.where(final | self._fixed, UNSET).unflatten(0, (self.captions, -1))

    @property
    def log_likelihood(self) -> Float32[Tensor, "B N"]:
        """Log-probability of the final tokens given the caption, in nats per token, fp32 [B, N], under the model
        itself: without temperature and guidance."""
        count = torch.as_tensor(self._final, device=self._nll.device).clamp_min(1)
        return -(self._nll[:, None] / count).view(self.captions, -1)

    @property
    def finished(self) -> bool:
        return self.position == self._tokens.shape[1]

    def sample(self) -> None:
        """Sample the tokens that the last step predicts."""
        w = self.logits.shape[1]
        targets = (self._first + torch.arange(w, device=self._tokens.device)).expand(len(self._tokens), -1)
        caption, empty = self.logits.chunk(2) if self.guided else (self.logits, None)
        logits = caption if empty is None else empty + self.guidance * (caption - empty)
        sampled = sample_token(self.sampler, logits.flatten(0, 1), self._uniform.gather(1, targets).flatten())
        guess, before = self._tokens.gather(1, targets), targets < self._final
        token = torch.where(self._fixed.gather(1, targets) | before, guess, sampled.view_as(targets))
        final = torch.ones_like(before)
        final[:, 1:] = (token == guess)[:, :-1].cumprod(1)
        nll = F.cross_entropy(caption.flatten(0, 1), token.flatten(), reduction="none").view_as(token)
        self._nll += (nll * (final & ~before)).sum(1)
        self.finite = self.finite & (logits.sum(-1).isfinite() | ~final).all()
        self._tokens.scatter_(1, targets, token)
        self._final = self._first + (1 if w == 1 else final.sum(1, keepdim=True))
        self._last = targets[:, -1:]  # position of the last sample
        if self._window.sizes[-1] > 1:
            gained = (final & ~before).sum(1)
            self._window.update(gained[gained > 0].tolist(), w, len(self.logits))

    def next_input(self, window: int) -> Int64[Tensor, "M2 W"]:
        """Return the last final token of each row, and guesses of the tokens after it."""
        if self._window.sizes[-1] == 1:
            self._first = self._final
            return self._twice(self._tokens.gather(1, self._last))
        final = torch.as_tensor(self._final, device=self._last.device).expand(len(self._tokens), 1)
        begin = (final - 1).clamp(max=self._tokens.shape[1] - 1 - window)
        positions = begin + torch.arange(window, device=self._last.device)
        rows_above = ((positions - self._last - 1) // self._width + 1).clamp_min(0)
        above = self._tokens.gather(1, (positions - rows_above * self._width).clamp_min(0))  # or the sample itself
        tokens = self._tokens.gather(1, positions).where(self._fixed.gather(1, positions), above)
        self._tokens.scatter_(1, positions, tokens)
        self._first, self.cache.length = begin + 1, self._twice(begin)
        return self._twice(tokens)

    def _twice(self, x: Int64[Tensor, "M W"]) -> Int64[Tensor, "M2 W"]:
        """Repeat rows for guidance."""
        return x.repeat(2, 1) if self.guided else x

    def select(self, candidates: Sequence[int]) -> None:
        """Drop all but some candidates of each caption, given by their index among the present ones."""
        offsets = self.n * torch.arange(self.captions)[:, None]
        rows = (offsets + torch.tensor(candidates)).flatten().to(self._tokens.device)
        both = torch.cat([rows, rows + len(self._tokens)]) if self.guided else rows
        self.cache, self.logits = self.cache.select(both), self.logits[both]
        self._first, self._final = (x[rows] if isinstance(x, Tensor) else x for x in (self._first, self._final))
        self._tokens, self._fixed, self._uniform, self._nll = (
            x[rows] for x in (self._tokens, self._fixed, self._uniform, self._nll)
        )
        self.n = len(candidates)


class Scheduler:
    """Continuous batching: groups join and leave between steps, and no group's tokens depend on other groups.

    A step reads the model's weights once for all rows, at any position. Only attention is computed separately
    for groups that joined at different times (selective batching: Yu et al. 2022, Orca, §3.2).
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self.decoder = decoder
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
        group = GenerationGroup(self.decoder, text, candidates, sampler, seed, prompt_tokens)
        if not group.finished:
            self.groups.append(group)
        return group

    def remove(self, group: GenerationGroup) -> None:
        """Stop generating a group."""
        self.groups.remove(group)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one token of each row or more, and remove finished groups."""
        for group in self.groups:
            group.sample()
        self.groups = [group for group in self.groups if not group.finished]
        window = min((group.window for group in self.groups), default=1)
        parts = [group.next_input(window) for group in self.groups]
        if len(self.groups) == 1:
            self.groups[0].logits = self.decoder.step(self.groups[0].cache, parts[0])
        elif self.groups:
            logits = self.decoder.step(RaggedBatch([group.cache for group in self.groups]), torch.cat(parts))
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
    progress: Callable[[int], object] | None = None,
    on_preview: Callable[[Tensor, int], None] | None = None,
) -> GenerationGroup:
    """Generate candidates of captions; the finished group has their `tokens` and `log_likelihood`.

    `Scheduler.add` explains the other arguments.

    Args:
        progress: called with the number of positions that all rows finished since the last call.
        on_preview: called with the tokens so far [B, N, S] and the number of finished grid rows, after each row.

    Raises `UserError` if a logit is not finite.
    """
    w, scheduler, before = decoder.config.grid[1], Scheduler(decoder), 0
    group = scheduler.add(text, candidates, sampler, seed=seed, prompt_tokens=prompt_tokens)
    while before < prod(decoder.config.grid):
        scheduler.step()
        if progress and group.position > before:
            progress(group.position - before)
        if on_preview:
            for row in range(before // w, group.position // w):
                on_preview(group.tokens, row + 1)
        before = group.position
    if not group.finite:
        raise UserError(
            "the logits of the prior are not finite, so its weights are damaged or have diverged: use another copy"
        )
    return group
