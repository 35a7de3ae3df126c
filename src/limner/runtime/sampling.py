"""Parallel sampling of one caption with numpy: the same tokens as `sampling/parallel.py`, which explains the method.

Shapes: M rows (candidates), W tokens of a step, T text positions, S image positions, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from limner.errors import UserError
from limner.numerics.seeding import candidate_seed
from limner.sampling.generation_config import UNSET, Sampler
from limner.sampling.window import Window

__all__ = ["Prior", "candidate_noise", "generate", "sample_token"]


class Prior(Protocol):
    """A prior that has read one caption."""

    max_window: int

    def start(self, rows: int) -> np.ndarray:
        """Begin with this number of candidates. Return the logits [V] of the first token."""
        ...

    def step(self, tokens: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Read tokens [M, W] from positions [M, 1] on. Return the logits [M, W, V] of the token after each."""
        ...

    def select(self, rows: np.ndarray) -> None:
        """Drop all but some candidates."""
        ...


def generate(
    caption: Prior,
    empty: Prior | None,
    sampler: Sampler,
    noise: np.ndarray,
    prompt_tokens: np.ndarray,
    width: int,
    progress: Callable[[int], object] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample the tokens of one caption.

    Args:
        caption, empty: the prior after the caption; after no caption, for a sampler with guidance.
        noise: uniform numbers, fp32 [M, S].
        prompt_tokens: [S], `UNSET` where to sample.
        width: columns of the grid.
        progress: called with the number of candidates that were finished since the last call.

    Returns tokens [M, S] and the mean log-probability of each row's tokens under the prior itself, [M]. Raises
    `UserError` if a logit is not finite.
    """
    priors = [caption] if empty is None else [caption, empty]
    m, s = noise.shape
    window = Window(m * len(priors), min(caption.max_window, s - 1))
    logits = [np.repeat(prior.start(m)[None, None], m, 0) for prior in priors]
    group = _Rows(sampler, noise, prompt_tokens, width)
    while True:
        gained, done = group.sample(*logits)
        window.update(gained[gained > 0].tolist(), logits[0].shape[1], len(done) * len(priors))
        if done.any():
            group.drop(done)
            if progress:
                progress(int(done.sum()))
            if done.all():
                return group.tokens, -group.nll / s
            for prior in priors:
                prior.select(np.flatnonzero(~done))
        tokens, position = group.next_input(window.size)
        logits = [prior.step(tokens, position) for prior in priors]


class _Rows:
    """Tokens [M, S] of all candidates, final ones and guesses, of which `rows` are unfinished."""

    def __init__(self, sampler: Sampler, noise: np.ndarray, prompt_tokens: np.ndarray, width: int) -> None:
        self.sampler, self.noise, self.width, m = sampler, noise, width, len(noise)
        self.tokens, self.nll = np.repeat(prompt_tokens[None], m, 0), np.zeros(m)
        self.fixed, self.rows = prompt_tokens != UNSET, np.arange(m)
        # The first position that the logits predict, and the number of final tokens, of each row.
        self.first = self.final = np.zeros((m, 1), np.int64)

    def sample(self, logits: np.ndarray, empty: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Sample from logits [M, W, V]. Return how many tokens became final in each row, and which rows are done."""
        w, rows = logits.shape[1], self.rows[:, None]
        targets = self.first + np.arange(w)
        scale = np.float32(1 if self.sampler.guidance is None else self.sampler.guidance)
        guided = logits if empty is None else empty + scale * (logits - empty)
        sampled = sample_token(self.sampler, guided.reshape(-1, guided.shape[-1]), self.noise[rows, targets].ravel())
        guess, before = self.tokens[rows, targets], targets < self.final
        token = np.where(self.fixed[targets] | before, guess, sampled.reshape(targets.shape))
        final = np.ones_like(before)
        final[:, 1:] = np.logical_and.accumulate((token == guess)[:, :-1], 1)
        if not np.isfinite(guided.sum(-1))[final].all():
            raise UserError(
                "the logits of the prior are not finite, so its weights are damaged or have diverged: use another copy"
            )
        self.nll[self.rows] -= (_log_probability(logits, token) * (final & ~before)).sum(1)
        self.tokens[rows, targets] = token
        self.final, self.last = self.first + final.sum(1, keepdims=True), targets[:, -1:]
        return (final & ~before).sum(1), self.final[:, 0] >= self.tokens.shape[1]

    def drop(self, done: np.ndarray) -> None:
        """Keep the rows that are not done, bool [M]."""
        self.rows, self.final, self.last = self.rows[~done], self.final[~done], self.last[~done]

    def next_input(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the last final token of each row and guesses of the tokens after it, [M, W], and their position."""
        begin = np.minimum(self.final - 1, self.tokens.shape[1] - 1 - window)
        positions, rows = begin + np.arange(window), self.rows[:, None]
        rows_above = np.maximum((positions - self.last - 1) // self.width + 1, 0)
        above = self.tokens[rows, np.maximum(positions - rows_above * self.width, 0)]  # or the sample itself
        self.tokens[rows, positions] = np.where(self.fixed[positions], self.tokens[rows, positions], above)
        self.first = begin + 1
        return self.tokens[rows, positions], begin


def sample_token(sampler: Sampler, logits: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Sample tokens [M] from fp32 logits [M, V], with uniform numbers [M], as `sampling.generate.sample_token` does."""
    if sampler.temperature == 0:
        return logits.argmax(-1)
    if sampler.temperature not in (1, None):
        logits = logits / np.float32(sampler.temperature)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    if sampler.top_k is not None or sampler.top_p is not None:
        p = _truncated(p, sampler.top_k, sampler.top_p)
    cdf = p.cumsum(-1, dtype=np.float64).astype(np.float32)
    mass = cdf[:, -1:]
    target = np.minimum(uniform[:, None] * mass, np.nextafter(mass, np.float32(0)))  # below 1 despite rounding
    return np.minimum((cdf <= target).sum(-1), cdf.shape[1] - 1)


def _truncated(p: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Set unlikely tokens of p [M, V] to 0: all but the `top_k` likeliest, and of these the share `top_p`."""
    order = np.argsort(-p, axis=-1, kind="stable")
    falling = np.take_along_axis(p, order, -1)
    if top_k is not None:
        falling[:, top_k:] = 0
    if top_p is not None:  # keep the likeliest token, and others if the mass before them is below top_p
        total = falling.sum(-1, keepdims=True)
        falling[:, 1:] *= (falling.cumsum(-1) - falling < np.float32(top_p) * total)[:, 1:]
    truncated = np.zeros_like(p)
    np.put_along_axis(truncated, order, falling, -1)
    return truncated


def _log_probability(logits: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Log-probability of tokens [M, W] under logits [M, W, V]."""
    top = logits.max(-1, keepdims=True)
    normalizer = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return np.take_along_axis(logits, token[..., None], -1)[..., 0] - normalizer


def candidate_noise(seed: int, candidates: range, length: int) -> np.ndarray:
    """Uniform numbers in [0, 1), fp32 [N, length], those of `sampling.generate.candidate_noise`.

    torch's generator on a CPU is a Mersenne Twister, of whose words `torch.rand` takes the lower 24 bits.
    """
    words = [np.random.RandomState(candidate_seed(seed, i)).randint(0, 2**32, length, np.uint32) for i in candidates]
    return ((np.stack(words) & 0xFFFFFF) * 2.0**-24).astype(np.float32)
