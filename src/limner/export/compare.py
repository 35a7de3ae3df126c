"""Comparison of exported files with the bundle: both draw the same captions, and their tokens are counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from limner.pipeline import TextToImage
from limner.progress import Advance

Draw = Callable[[str, int], np.ndarray]  # a caption and a seed -> the tokens [S] of one candidate

DRAWINGS = 4
_WORDS = 6  # tokens of a caption


def random_captions(pipe: TextToImage, count: int = DRAWINGS) -> list[str]:
    """Return captions of random tokens that a bundle's tokenizer knows."""
    rng = np.random.default_rng(0)
    words = [text for i in range(pipe.tokenizer.vocab_size) if (text := pipe.tokenizer.decode([i])).strip().isalnum()]
    return [" ".join(rng.choice(words, _WORDS).tolist()) for _ in range(count)]


def equal_tokens(pipe: TextToImage, draw: Draw, progress: Advance | None = None) -> list[float]:
    """Draw captions with a bundle and with its exported files. Return the share of equal tokens of each drawing."""
    shares = []
    for seed, caption in enumerate(random_captions(pipe)):
        reference = pipe.candidates([caption], 1, seed=seed).tokens[0, 0].numpy()
        shares.append(float((draw(caption, seed) == reference).mean()))
        if progress:
            progress(1)
    return shares
