"""Negatives of the contrastive loss that are hard: wrong captions of a picture, and spoiled copies of it.

The pairs of a batch differ in nearly everything, the candidates of one caption in one thing. So both sides get more to
choose from: each picture the `distractors` that a batch brings (`data/distractors.py` makes them), and each caption
copies of its picture in which something is missing, doubled or cut.

Shapes: B batch, K distractors, M spoiled copies of a picture, T text positions, E embedding.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from limner.models.contrastive import Contrastive
from limner.text import PAD

_TOUCHED = 0.03  # share of the pasted rectangle's values that must change for a picture to be spoiled


def distractor_logits(
    model: Contrastive, images: Float[Tensor, "B E"], distractors: Int64[Tensor, "B K T"]
) -> Float[Tensor, "B K"]:
    """Each picture against its own distractors; rows of padding alone are no choice, -inf."""
    texts = model.encode_text(distractors.flatten(0, 1)).unflatten(0, distractors.shape[:2])
    logits = model.scale() * (texts @ images[..., None]).squeeze(-1)
    return logits.masked_fill((distractors == PAD).all(-1), -torch.inf)


def spoiled_logits(
    scale: Float[Tensor, ""], texts: Float[Tensor, "B E"], copies: Float[Tensor, "M B E"], intact: Bool[Tensor, "M B"]
) -> Float[Tensor, "B M"]:
    """Each caption against the spoiled copies of its own picture; a copy that is `intact` is no choice, -inf."""
    return (scale * (copies * texts).sum(-1)).masked_fill(intact, -torch.inf).T


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
