"""Contrastive loss with hard negatives: wrong captions of a picture, and altered copies of it.

The pairs of a batch differ in nearly everything, but the candidates of one caption, which the model ranks, differ in
one thing. So both sides get further negatives: a picture the `distractors` of the batch
(`data/hard_negative_captions.py`), and a caption copies of its picture in which something is missing, doubled or cut.
Two samples with the same caption are positives of each other.

If several processes share a batch, the negatives are those of all processes (`gathered`).

Shapes: B batch (of a process), N that of all processes, K distractors or altered copies, T text positions, E embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Num, UInt8
from torch import Tensor

from limner.models.contrastive import CLIP
from limner.objectives.contrastive import logits
from limner.text import PAD
from limner.validation import Range, Validated

__all__ = ["HardNegativeLoss", "candidate_logits", "cut_paste"]

_MIN_CHANGED = 0.03  # share of the pasted rectangle's pixels that must change, otherwise the copy counts as intact


@dataclass(frozen=True, kw_only=True)
class HardNegativeLoss(Validated):
    """Cross-entropy in both directions, with altered copies of each picture and the batch's `distractors`, if any.

    `CLIPLoss` explains the metrics.

    Args:
        cut_paste_negatives: number of copies of each picture into which a rectangle of another picture is pasted.
    """

    cut_paste_negatives: Annotated[int, Range(0, 1_000)] = 0

    def gathered(self, all_gather: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return the objective for one of several processes; `all_gather` gathers the rows of all processes."""
        return partial(self, all_gather=all_gather)

    def __call__(
        self,
        model: CLIP,
        batch: dict[str, Tensor],
        step: int,
        generator: torch.Generator | None,
        all_gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        text, pixels = batch["text"], batch["pixels"]
        copies = [cut_paste(pixels, shift, generator) for shift in range(self.cut_paste_negatives)]
        wrong = batch["distractors"].unbind(1) if "distractors" in batch else ()
        # Each tower runs once: a sharded one reduces its gradients after its first backward pass.
        images, *pasted = model.encode_image(torch.cat([pixels, *(copy for copy, _ in copies)])).split(len(text))
        texts, *distractors = model.encode_text(torch.cat([text, *wrong])).split(len(text))
        scale = model.scale()
        captions, pictures = logits(scale, images, all_gather(texts)), logits(scale, texts, all_gather(images))
        same = (text[:, None] == all_gather(text)[None]).all(-1).to(texts.dtype)
        target = same / same.sum(1, keepdim=True)
        if wrong:
            empty = torch.stack([(rows == PAD).all(-1) for rows in wrong])
            captions = torch.cat([captions, candidate_logits(scale, images, torch.stack(distractors), empty)], 1)
        if copies:
            intact = torch.stack([unchanged for _, unchanged in copies])
            pictures = torch.cat([pictures, candidate_logits(scale, texts, torch.stack(pasted), intact)], 1)
        n = same.shape[1]
        picked = captions.log_softmax(1)[:, :n] + pictures.log_softmax(1)[:, :n]
        loss = -(target * picked).sum() / (2 * len(text))
        accuracy, text_to_image_acc = _accuracy(captions, same), _accuracy(pictures, same)
        metrics = {"accuracy": accuracy, "text_to_image_acc": text_to_image_acc, "scale": scale}
        return loss, {name: value.detach() for name, value in metrics.items()}


def candidate_logits(
    scale: Float[Tensor, ""], rows: Float[Tensor, "B E"], choices: Float[Tensor, "K B E"], none: Bool[Tensor, "K B"]
) -> Float[Tensor, "B K"]:
    """Return the logits of each row against its own K choices, [B, K]; -inf where `none` is true."""
    return (scale * (choices * rows).sum(-1)).masked_fill(none, -torch.inf).T


def cut_paste(
    pixels: UInt8[Tensor, "B 3 H W"], shift: int, generator: torch.Generator | None
) -> tuple[UInt8[Tensor, "B 3 H W"], Bool[Tensor, " B"]]:
    """Paste into each picture a rectangle of the picture `shift` places later in the batch.

    With a shift of 0 the rectangle comes from another place in the same picture. uint8 [B, 3, H, W] -> the
    same, and bool [B]: true for copies that hardly change.
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
    pasted = torch.where(inside[:, None], moved.view_as(pixels), pixels)
    changed = ((pasted.int() - pixels.int()).abs().amax(1) > 32).sum((1, 2))
    return pasted, changed < _MIN_CHANGED * inside.sum((1, 2))


def _accuracy(choices: Tensor, same: Tensor) -> Tensor:
    """Return the share of rows of [B, N + K] whose maximum is at a positive, true in `same` [B, N]."""
    picked = choices.argmax(1, keepdim=True)
    return F.pad(same, (0, choices.shape[1] - same.shape[1])).gather(1, picked).mean()
