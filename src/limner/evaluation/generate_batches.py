"""What evaluations share: captions drawn part by part, verdicts on drawings, and what a caption counts for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from limner.evaluation.confidence import drawing_seed
from limner.pipeline import Candidates, TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import Sampler
from limner.tasks import scenes
from limner.tasks.scenes import Scene

_TOGETHER = 16  # captions drawn between two rounds of judging, so that memory stays small

Holds = Callable[[np.ndarray], bool]  # whether uint8 [H, W, 3] shows what was asked for


def drawn(
    pipe: TextToImage,
    captions: Sequence[str],
    candidates: int,
    seed: int,
    sampler: Sampler = Sampler(),
    given: Tensor | None = None,
    progress: Advance | None = None,
) -> Iterator[tuple[range, Candidates]]:
    """The candidates of all captions, those of some captions at a time, with the numbers of these; caption i is drawn
    with `drawing_seed(seed, i)`, below the tokens `given[i]`."""
    for start in range(0, len(captions), _TOGETHER):
        part = range(start, min(start + _TOGETHER, len(captions)))
        yield part, pipe.candidates(
            [captions[i] for i in part], candidates, seed=[drawing_seed(seed, i) for i in part], sampler=sampler,
            given=None if given is None else given[part.start : part.stop], progress=progress,
        )  # fmt: skip


def verdicts(pictures: Tensor, holds: Holds) -> np.ndarray:
    """The oracle's verdict on each of uint8 [N, 3, H, W], bool [N]; equal pictures are read once."""
    flat, same = torch.unique(pictures.flatten(1), dim=0, return_inverse=True)
    distinct = flat.unflatten(1, pictures.shape[1:]).permute(0, 2, 3, 1).numpy()
    return np.array([holds(picture) for picture in distinct])[same.numpy()]


def combination(*panels: Scene) -> str:
    """The combination that a caption counts for: the first held-out one in sorted order, else its first thing's."""
    found = [(thing.look, panel.background) for panel in panels for thing in panel.things]
    look, background = min((one for one in found if scenes.held_out(*one)), default=found[0])
    return f"{' '.join(look)} on {background}"
