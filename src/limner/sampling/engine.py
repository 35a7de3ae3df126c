"""Engine: requests become drawings. The prior samples tokens, the dVAE decodes them, the contrastive model scores them.

Requests may come and go at any time: their candidates share the steps of the prior, and what is finished at the same
time is decoded and scored together. A picture depends on its caption, settings, seed and candidate number alone, apart
from float rounding. Clients take turns to join when there are more candidates than fit.

Shapes: B captions, N candidates of each, T text positions, S image positions, H x W pixels.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limner.errors import UserError
from limner.progress import Advance
from limner.sampling.generate import UNSET
from limner.sampling.generation import Generation, TokenRequest
from limner.sampling.generation_config import Sampler
from limner.sampling.inference import InferenceModels
from limner.sampling.parallel import Batch, check_finite
from limner.sampling.rerank import scores
from limner.validation import SEEDS, InvalidSetting

__all__ = ["Candidates", "Engine", "Job", "OnPreview", "Preview", "Request", "caption_seeds"]

# Joining reads captions and arranges all rows: few requests wait for others, for at most some steps.
_JOINING_FRACTION, _MAX_DELAY = 1 / 4, 4  # of the rows; steps
OnPreview = Callable[["Preview"], object]


@dataclass(frozen=True)
class Candidates:
    """All candidates of B captions, in the order of their numbers.

    Attributes:
        pictures: uint8 [B, N, 3, H, W].
        scores: float32 [B, N], higher is better; see `Drawing.score`.
        tokens: int64 [B, N, S].
        settings: metadata of each caption's drawings, [B]; see `Request.settings`.
    """

    pictures: Tensor
    scores: Tensor
    tokens: Tensor
    settings: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Preview:
    """The top rows of unfinished drawings.

    Attributes:
        caption: index of the caption.
        candidates: numbers of n candidates.
        pictures: uint8 [n, 3, current height, W], on the CPU. The last rows may still change slightly, since the
            dVAE's decoder also depends on the rows below.
    """

    caption: int
    candidates: range
    pictures: Tensor


@dataclass(frozen=True, kw_only=True)
class Request:
    """Candidates of a caption to draw.

    Attributes:
        text, rerank_text: int64 [T], the caption's tokens for the prior and for the contrastive model.
        candidates: their number.
        sampler: with all settings that have a default filled in.
        prompt_tokens: int64 [S], fixed image tokens, `UNSET` where to sample; None to sample all.
        follows: subject and style of the training picture that the caption's tokens contain, if they do.
        client: requests of different clients take turns to join.
        on_preview: called with candidate numbers and their pictures after every `preview_every` rows of tokens.
        preview_first: only candidates with smaller numbers have previews; None: all have.
    """

    text: Tensor
    rerank_text: Tensor
    candidates: int
    seed: int
    sampler: Sampler
    prompt_tokens: Tensor | None = None
    follows: str | None = None
    client: Hashable = None
    on_preview: Callable[[range, Tensor], object] | None = None
    preview_every: int = 2
    preview_first: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Metadata of the drawings: settings of the sampler, and the training picture that they follow."""
        return self.sampler.to_metadata() | {"follows": self.follows}


class Job:
    """A submitted request.

    Attributes:
        tokens, pictures, scores: int64 [N, S], uint8 [N, 3, H, W] and float32 [N], valid once `done`.
        error: a model's output was not finite, and the job ended.
    """

    def __init__(self, request: Request, length: int, side: int) -> None:
        self.request, n = request, request.candidates
        self.tokens = torch.empty(n, length, dtype=torch.long)
        self.pictures = torch.empty(n, 3, side, side, dtype=torch.uint8)
        self.scores = torch.empty(n)
        self.parts: list[_Part] = []
        self.error: UserError | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or all(part.done for part in self.parts)

    @property
    def progress(self) -> float:
        """Number of candidates drawn; unfinished ones count by their tokens."""
        finished = sum(part.position * len(part.tokens.candidates) for part in self.parts)
        return finished / self.tokens.shape[1]


@dataclass(eq=False)
class _Part:
    """Candidates of a job that fit into a batch."""

    job: Job
    tokens: TokenRequest
    generation: Generation | None = None
    previewed: int = 0  # rows of tokens
    done: bool = False

    @property
    def position(self) -> int:
        return self.generation.position if self.generation else 0


class Engine:
    """Draws requests. One thread may use it at a time."""

    def __init__(self, models: InferenceModels) -> None:
        self.models = models
        self._waiting: OrderedDict[Hashable, deque[_Part]] = OrderedDict()
        self._running: list[_Part] = []
        self._batch = Batch(models.decoder)
        self._delayed = 0  # steps for which waiting requests have not joined

    def submit(self, request: Request) -> Job:
        """Queue a request. `step` draws it, together with others."""
        (h, w), rows = self.models.dvae.config.grid, self.models.max_rows()
        job = Job(request, h * w, self.models.dvae.config.size)
        size = max(1, rows // (1 + request.sampler.guided))
        text = request.text.to(self.models.device)
        prompt = None if request.prompt_tokens is None else request.prompt_tokens.to(self.models.device)
        for begin in range(0, request.candidates, size):
            part = range(begin, min(begin + size, request.candidates))
            tokens = TokenRequest(
                text=text, candidates=part, sampler=request.sampler, seed=request.seed, prompt_tokens=prompt
            )
            job.parts.append(_Part(job, tokens))
        self._waiting.setdefault(request.client, deque()).extend(job.parts)
        return job

    def cancel(self, job: Job) -> None:
        """Stop drawing a job. Other jobs continue."""
        for part in self._running:
            if part.job is job and part.generation and not part.generation.finished:
                self._batch.remove(part.generation)
        self._running = [part for part in self._running if part.job is not job]
        waiting = {client: deque(p for p in parts if p.job is not job) for client, parts in self._waiting.items()}
        self._waiting = OrderedDict((client, parts) for client, parts in waiting.items() if parts)

    def run(self, jobs: Sequence[Job], progress: Advance | None = None) -> None:
        """Draw jobs, and cancel them if an exception interrupts that. Raises the error of a job.

        `progress` is called with the number of candidates drawn since the last call.
        """
        reported = 0
        try:
            while not all(job.done for job in jobs):
                self.step()
                drawn = int(sum(job.progress for job in jobs)) if progress else 0
                if progress and drawn > reported:
                    progress(drawn - reported)
                reported = drawn
        finally:
            for job in jobs:
                self.cancel(job)
        for job in jobs:
            if job.error:
                raise job.error

    @torch.inference_mode()
    def step(self) -> None:
        """Let waiting candidates join, sample tokens of all, and finish what is complete."""
        self._join()
        self._batch.step()
        for part in self._running:
            self._preview(part)
        finished = [part for part in self._running if part.generation and part.generation.finished]
        self._running = [part for part in self._running if part not in finished]
        for same_size in _by(finished, lambda part: len(part.tokens.candidates)):
            self._finish(same_size)

    def _join(self) -> None:
        """Add parts to the batch, one client after the other, while they fit."""
        if not self._waiting:
            return
        rows, limit, joining = self._batch.size, self.models.max_rows(), list[_Part]()
        waiting = sum(part.tokens.rows for parts in self._waiting.values() for part in parts)
        if waiting < rows * _JOINING_FRACTION and self._delayed < _MAX_DELAY:
            self._delayed += 1
            return
        self._delayed = 0
        while self._waiting:
            client, parts = next(iter(self._waiting.items()))
            if rows and rows + parts[0].tokens.rows > limit:
                break
            rows += parts[0].tokens.rows
            joining.append(parts.popleft())
            self._waiting.move_to_end(client)
            if not parts:
                del self._waiting[client]
        if joining and not self._batch.size:
            self._batch = Batch(self.models.decoder, rows)
        # A prompt that some give is read once for all their candidates.
        for parts in _by(joining, lambda part: part.tokens.prompt_tokens is None):
            for part, generation in zip(parts, self._batch.add([part.tokens for part in parts]), strict=True):
                part.generation = generation
        self._running += joining

    def _preview(self, part: _Part) -> None:
        request, (_, width) = part.job.request, self.models.dvae.config.grid
        candidates, first = part.tokens.candidates, request.preview_first
        numbers = range(candidates.start, candidates.stop if first is None else min(candidates.stop, first))
        if not (request.on_preview and part.generation and numbers):
            return
        rows = part.position // width // request.preview_every * request.preview_every
        if rows > part.previewed:
            part.previewed = rows
            tokens = part.generation.tokens[None, : len(numbers), : rows * width]
            request.on_preview(numbers, self.models.decode(tokens, rows)[0].cpu())

    def _finish(self, parts: list[_Part]) -> None:
        """Decode and score finished candidates, of the same number in each part."""
        generations = [part.generation for part in parts if part.generation]
        tokens = torch.stack([generation.tokens for generation in generations])
        try:
            check_finite(generations)
            pictures = self.models.decode(tokens, self.models.dvae.config.grid[0])
            text = torch.stack([part.job.request.rerank_text for part in parts]).to(self.models.device)
            cosines = scores(self.models.contrastive, text, pictures).float()
        except UserError as error:
            if len(parts) > 1:  # one of them may be right
                for part in parts:
                    self._finish([part])
                return
            parts[0].job.error = error
            self.cancel(parts[0].job)
            return
        for part, generation, *values in zip(parts, generations, tokens, pictures, cosines, strict=True):
            job, numbers = part.job, part.tokens.candidates
            given = part.tokens.prompt_tokens
            inpainting = given is not None and bool((given != UNSET).any())
            likelihood = generation.log_likelihood
            score = likelihood if inpainting else values[2] + self.models.prior_score_weight * likelihood
            for kept, value in zip((job.tokens, job.pictures, job.scores), (*values[:2], score), strict=True):
                kept[numbers.start : numbers.stop] = value.cpu()
            part.done = True


def _by(parts: Iterable[_Part], key: Callable[[_Part], Any]) -> list[list[_Part]]:
    groups: dict[Any, list[_Part]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return list(groups.values())


def caption_seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """Return a seed per caption, as Python integers, since numpy's overflow. Raises `UserError` for an invalid seed."""
    seeds = [seed] * count if isinstance(seed, (int, np.integer)) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} captions")
    try:
        for value in seeds:
            SEEDS.check("seed", value, whole=True)
    except InvalidSetting as error:
        raise UserError(str(error)) from None
    return [int(value) for value in seeds]
