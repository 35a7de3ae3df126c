"""Requests of a batch (`parallel.py`): what they ask for, the state of their candidates, and their rows in the cache.

Shapes: N candidates of a request, M candidates in all, A unfinished ones, G of these with guidance, R = A + G rows of
the cache, W tokens of a step, T text positions, S image positions, V image vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from limner.sampling.generate import UNSET, candidate_noise
from limner.sampling.generation_config import Sampler

__all__ = ["CacheRow", "Generation", "Layout", "Rows", "TokenRequest", "common_prompts"]


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """Candidates of a caption to sample.

    Attributes:
        text: int64 [T].
        candidates: candidate numbers; `range(32, 64)` continues where `range(32)` ended.
        sampler: its guidance is classifier-free (Ho & Salimans 2022): the logits are
            `empty + guidance * (caption - empty)`. 1 or None turns guidance off. Other values need a model trained with
            caption dropout.
        prompt_tokens: int64 [S], fixed image tokens, `UNSET` where to sample. Top rows prime the model (§3.3, Figure
            14). With fixed tokens elsewhere, sampling in raster order inpaints.
    """

    text: Int64[Tensor, " T"]
    candidates: range
    sampler: Sampler
    seed: int = 0
    prompt_tokens: Int64[Tensor, " S"] | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the cache that the candidates take."""
        return len(self.candidates) * (1 + self.sampler.guided)


class Rows(NamedTuple):
    """State of candidates."""

    tokens: Int64[Tensor, "M S"]  # beyond the final tokens, guesses
    fixed: Bool[Tensor, "M S"]  # True for prompt tokens
    uniform: Float32[Tensor, "M S"]
    final: Int64[Tensor, " M"]  # number of final tokens
    last: Int64[Tensor, " M"]  # position of the last sample; after it, guesses are the tokens above
    nll: Float32[Tensor, " M"]  # of the final tokens, in nats
    finite: Bool[Tensor, " M"]  # False if a logit was not


class Generation:
    """The candidates of a request, while a batch samples them and afterwards.

    Attributes:
        position: number of final tokens that every candidate has.
    """

    def __init__(self, request: TokenRequest, length: int, given: int, nll: Tensor) -> None:
        self.request, self.position, device = request, given, nll.device
        prompt = torch.full((length,), UNSET, device=device) if request.prompt_tokens is None else request.prompt_tokens
        tokens = prompt.repeat(len(request.candidates), 1)
        uniform = candidate_noise(request.seed, request.candidates, length).to(device)
        final = torch.full((len(tokens),), given, device=device)
        self.rows = Rows(tokens, tokens != UNSET, uniform, final, final - 1, nll.repeat(len(tokens)), final >= 0)

    @property
    def finished(self) -> bool:
        return self.position == self.rows.tokens.shape[1]

    @property
    def tokens(self) -> Int64[Tensor, "N S"]:
        """Final tokens, int64 [N, S], `UNSET` elsewhere."""
        final = torch.arange(self.rows.tokens.shape[1], device=self.rows.final.device) < self.rows.final[:, None]
        return self.rows.tokens.where(final | self.rows.fixed, UNSET)

    @property
    def log_likelihood(self) -> Float32[Tensor, " N"]:
        """Log-probability of the final tokens given the caption, in nats per token, fp32 [N], under the model itself:
        without temperature and guidance."""
        return -self.rows.nll / self.rows.final.clamp_min(1)


class CacheRow(NamedTuple):
    """A candidate's row of the cache."""

    generation: Generation
    candidate: int
    empty: bool  # True if it has the empty caption, for guidance


class Layout:
    """Indices of the rows of a cache, of which None are free: they repeat the tokens of another row.

    Attributes:
        generations: those that the rows belong to.
        candidates: [A], of the state.
        of_row: index [R] into `candidates`.
        captioned, empty: rows [A] and [G] with the caption and with the empty one.
        samplers: each with its indices into `candidates`.
    """

    def __init__(
        self, rows: Sequence[CacheRow | None], generations: Sequence[Generation], device: torch.device
    ) -> None:
        sizes = [len(generation.request.candidates) for generation in generations]
        starts = dict(zip(map(id, generations), accumulate(sizes, initial=0), strict=False))
        used = {i: row for i, row in enumerate(rows) if row}
        self.generations = list({id(row.generation): row.generation for row in used.values()}.values())
        captioned = [i for i, row in used.items() if not row.empty]
        empty = [i for i, row in used.items() if row.empty]
        numbers = {i: starts[id(row.generation)] + row.candidate for i, row in used.items()}
        index = {numbers[i]: a for a, i in enumerate(captioned)}
        by_sampler: dict[Sampler, list[int]] = {}
        for a, i in enumerate(captioned):
            by_sampler.setdefault(replace(used[i].generation.request.sampler, guidance=None), []).append(a)
        scales = [used[i].generation.request.sampler.guidance for i in empty]

        def tensor(x: Sequence[int]) -> Tensor:
            return torch.tensor(x, dtype=torch.long, device=device)

        of_row = [index[numbers[i]] if i in numbers else 0 for i in range(len(rows))]
        self.candidates, self.of_row = tensor([*index]), tensor(of_row)
        self.empty, all_rows = tensor(empty), len(captioned) == len(rows)
        self.captioned = slice(None) if all_rows else tensor(captioned)  # a slice does not copy
        one = len(by_sampler) == 1
        self.samplers = [(sampler, slice(None) if one else tensor(i)) for sampler, i in by_sampler.items()]
        self._scale = torch.tensor(scales, device=device)[:, None, None] if empty else None

    def guided(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits given the captions, [A, W, V], and with guidance."""
        caption = logits[self.captioned]
        if self._scale is None:
            return caption, caption
        empty, with_guidance = logits[self.empty], self.of_row[self.empty]
        guided = caption.index_copy(0, with_guidance, empty + self._scale * (caption[with_guidance] - empty))
        return caption, guided


def common_prompts(requests: Sequence[TokenRequest]) -> Int64[Tensor, "B P"]:
    """Return the first tokens that all requests give; for those with guidance, once more."""
    prompts = [request.prompt_tokens for request in requests]
    prompts += [request.prompt_tokens for request in requests if request.sampler.guided]
    given = [prompt for prompt in prompts if prompt is not None]
    if len(given) < len(prompts):
        return requests[0].text.new_zeros(len(prompts), 0)
    stacked = torch.stack(given)
    return stacked[:, : int((stacked != UNSET).all(0).long().cumprod(0).sum())]
