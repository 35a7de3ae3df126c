"""Codebook pruning: remove the codes that no picture uses. The pictures stay the same.

A dVAE trained to use few codes (by a usage penalty) still has weights for each unused code, and so does the prior,
which has learned never to sample them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.errors import UserError
from limner.models.image_tokenizer import ImageTokenizer
from limner.pipeline import TextToImage
from limner.progress import progress

M = TypeVar("M", bound=nn.Module)


def used_codes(dvae: ImageTokenizer, source: Source) -> Tensor:
    """Return the sorted codes of the pictures of `source`, int64 [K]. Raises `UserError` if no picture is readable."""
    images, used = ImageCaptionDataset(source, dvae.config.size), torch.zeros(dvae.config.vocab, dtype=torch.bool)
    device = next(dvae.parameters()).device
    with progress("looking for codes in use", len(source), unit="image") as bar:
        for part in np.array_split(np.arange(len(source)), -(-len(source) // 64)):
            pixels = images.load(part)[1]
            if len(pixels):
                used[dvae.tokenize(pixels.to(device)).unique().cpu()] = True
            bar.advance(len(part))
    if not used.any():
        raise UserError("no picture of the data is readable, so no code is in use: `limner data show` lists the errors")
    return used.nonzero()[:, 0]


def prune(pipe: TextToImage, used: Tensor) -> TextToImage:
    """Return a pipeline whose code k is code `used[k]` of `pipe`; `used` is int64 [K]."""
    k = len(used)
    dvae = _copy_weights(pipe.dvae, replace(pipe.dvae.config, vocab=k).build(), used)
    prior = _copy_weights(pipe.prior, replace(pipe.prior.config, image_vocab=k).build(), used)
    contrastive = _copy_weights(pipe.contrastive, pipe.contrastive.config.build(), used)  # no codes
    examples = pipe.examples and pipe.examples.renumbered(used.numpy())
    return TextToImage(dvae, prior, contrastive, pipe.tokenizer, pipe.info, examples=examples)


def _copy_weights(model: nn.Module, smaller: M, used: Tensor) -> M:
    """Copy the weights of `model` into `smaller`, on the CPU, keeping the positions `used` of each longer axis."""
    values = {name: value.cpu() for name, value in model.state_dict().items()}
    for name, target in smaller.state_dict().items():
        for dim in range(target.ndim):
            if values[name].shape[dim] != target.shape[dim]:
                values[name] = values[name].index_select(dim, used)
    smaller.load_state_dict(values)
    return smaller.eval().requires_grad_(False)
