"""Parts shared by evaluations: batched generation, verdicts on pictures, and clusters of captions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from limner.evaluation.confidence import drawing_seed
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.engine import Candidates
from limner.sampling.generation_config import Sampler
from limner.tasks import scenes
from limner.tasks.scenes import Scene

_CAPTIONS_PER_BATCH = 16  # bounds the memory for candidates that wait for a verdict

Predicate = Callable[[np.ndarray], bool]  # True if the picture, uint8 [H, W, 3], shows what the caption says


def generate_batches(
    pipe: TextToImage,
    captions: Sequence[str],
    candidates: int,
    seed: int,
    sampler: Sampler = Sampler(),
    prompt_tokens: Tensor | None = None,
    progress: Advance | None = None,
) -> Iterator[tuple[range, Candidates]]:
    """Generate the candidates of all captions; yield (range of caption indices, their candidates) for each batch.

    Caption i uses `drawing_seed(seed, i)` and continues the image tokens `prompt_tokens[i]`, if there are any.
    """
    for start in range(0, len(captions), _CAPTIONS_PER_BATCH):
        part = range(start, min(start + _CAPTIONS_PER_BATCH, len(captions)))
        yield part, pipe.candidates(
            [captions[i] for i in part], candidates, seed=[drawing_seed(seed, i) for i in part], sampler=sampler,
            prompt_tokens=None if prompt_tokens is None else prompt_tokens[part.start : part.stop], progress=progress,
        )  # fmt: skip


def to_image(pixels: Tensor) -> Image.Image:
    """Return uint8 [3, H, W] as a picture."""
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def verdicts(pictures: Tensor, predicate: Predicate) -> np.ndarray:
    """Apply a predicate to uint8 [N, 3, H, W], giving bool [N]; equal pictures are checked once."""
    flat, inverse = torch.unique(pictures.flatten(1), dim=0, return_inverse=True)
    distinct = flat.unflatten(1, pictures.shape[1:]).permute(0, 2, 3, 1).numpy()
    return np.array([predicate(picture) for picture in distinct])[inverse.numpy()]


def attribute_key(*panels: Scene) -> str:
    """Return the cluster of a caption: its first held-out attribute combination in sorted order, else its first one."""
    combinations = [(item.attributes, panel.background) for panel in panels for item in panel.objects]
    attributes, background = min((pair for pair in combinations if scenes.held_out(*pair)), default=combinations[0])
    return f"{' '.join(attributes)} on {background}"
