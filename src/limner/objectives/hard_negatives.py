"""The contrastive loss with negatives that are hard: wrong captions of a picture, and spoiled copies of it.

The pairs of a batch differ in nearly everything, the candidates of one caption in one thing. So both sides get more to
choose from: each picture the `distractors` that a batch brings (`data/hard_negative_captions.py` makes them), and each
caption copies of its picture in which something is missing, doubled or cut. Two samples that share a caption word for
word are no negatives of each other: both count as right.

Where several processes share a batch, the pictures and captions of all are to choose from (`across`).

Shapes: B batch (of a process), N that of all processes, K distractors or spoiled copies, T text positions, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Num, UInt8
from torch import Tensor

from limner.models.contrastive import Contrastive
from limner.objectives.contrastive import logits
from limner.text import PAD
from limner.validation import Checked, Range

_TOUCHED = 0.03  # share of the pasted rectangle's values that must change for a picture to be spoiled


@dataclass(frozen=True, kw_only=True)
class HardContrastiveLoss(Checked):
    """Cross-entropy in both directions, with `spoiled` copies of each picture and the batch's `distractors`, if any.

    `accuracy` is how often a picture picks its caption, `kept` how often a caption picks its picture.

    Args:
        spoiled: copies of each picture into which a rectangle of another one is pasted.
    """

    spoiled: Annotated[int, Range(0, 1_000)] = 0

    def __call__(
        self, model: Contrastive, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        return self._loss(model, batch, generator, lambda rows: rows)

    def across(self, join: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """The objective of one of several processes, whose rows `join` puts together."""
        return lambda model, batch, step, generator: self._loss(model, batch, generator, join)

    def _loss(
        self,
        model: Contrastive,
        batch: dict[str, Tensor],
        generator: torch.Generator | None,
        join: Callable[[Tensor], Tensor],
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        text, pixels = batch["text"], batch["pixels"]
        copies = [spoil(pixels, shift, generator) for shift in range(self.spoiled)]
        wrong = batch["distractors"].unbind(1) if "distractors" in batch else ()
        # Each tower runs once: a sharded one reduces its gradients after its first backward pass.
        images, *spoiled = model.encode_image(torch.cat([pixels, *(copy for copy, _ in copies)])).split(len(text))
        texts, *distractors = model.encode_text(torch.cat([text, *wrong])).split(len(text))
        scale = model.scale()
        captions, pictures = logits(scale, images, join(texts)), logits(scale, texts, join(images))  # to choose from
        same = (text[:, None] == join(text)[None]).all(-1).to(texts.dtype)
        target = same / same.sum(1, keepdim=True)
        if wrong:
            empty = torch.stack([(rows == PAD).all(-1) for rows in wrong])
            captions = torch.cat([captions, own_logits(scale, images, torch.stack(distractors), empty)], 1)
        if copies:
            intact = torch.stack([unchanged for _, unchanged in copies])
            pictures = torch.cat([pictures, own_logits(scale, texts, torch.stack(spoiled), intact)], 1)
        n = same.shape[1]
        picked = captions.log_softmax(1)[:, :n] + pictures.log_softmax(1)[:, :n]
        loss = -(target * picked).sum() / (2 * len(text))
        found = {"accuracy": _accuracy(captions, same), "kept": _accuracy(pictures, same), "scale": scale}
        return loss, {name: value.detach() for name, value in found.items()}


def own_logits(
    scale: Float[Tensor, ""], rows: Float[Tensor, "B E"], choices: Float[Tensor, "K B E"], none: Bool[Tensor, "K B"]
) -> Float[Tensor, "B K"]:
    """Each picture or caption against choices that are its alone; where there is `none`, -inf."""
    return (scale * (choices * rows).sum(-1)).masked_fill(none, -torch.inf).T


def spoil(
    pixels: UInt8[Tensor, "B 3 H W"], shift: int, generator: torch.Generator | None
) -> tuple[UInt8[Tensor, "B 3 H W"], Bool[Tensor, " B"]]:
    """A copy of each picture with a rectangle of another one pasted into it, `shift` places on in the batch.

    With a shift of 0 the rectangle comes from elsewhere in the picture itself. uint8 [B, 3, H, W] -> the
    same, and bool [B]: which copies show hardly any change.
    """
    b, _, h, w = pixels.shape

    def uniform(low: Tensor | float, high: Tensor | float) -> Tensor:
        return low + torch.rand(b, 1, 1, generator=generator, device=pixels.device) * (high - low)

    sides = [uniform(n / 8, n / 2).round() for n in (h, w)]
    to, source = ([uniform(0.0, n - side).round() for n, side in zip((h, w), sides, strict=True)] for _ in range(2))
    rows, columns = torch.arange(h, device=pixels.device)[:, None], torch.arange(w, device=pixels.device)
    inside = torch.ones(b, h, w, dtype=torch.bool, device=pixels.device)
    for at, begin, side in zip((rows, columns), to, sides, strict=True):
        inside &= (at >= begin) & (at < begin + side)
    y = (rows + source[0] - to[0]).long().clamp(0, h - 1)
    x = (columns + source[1] - to[1]).long().clamp(0, w - 1)
    moved = pixels.roll(-shift, 0).flatten(2).gather(2, (y * w + x).flatten(1)[:, None].expand(b, 3, -1))
    spoiled = torch.where(inside[:, None], moved.view_as(pixels), pixels)
    changed = ((spoiled.int() - pixels.int()).abs().amax(1) > 32).sum((1, 2))
    return spoiled, changed < _TOUCHED * inside.sum((1, 2))


def _accuracy(choices: Tensor, same: Tensor) -> Tensor:
    """How often the highest of [B, N + K] is among the right ones, [B, N]."""
    picked = choices.argmax(1, keepdim=True)
    return F.pad(same, (0, choices.shape[1] - same.shape[1])).gather(1, picked).mean()
