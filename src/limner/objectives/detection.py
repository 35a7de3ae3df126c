"""The loss of single-shot detectors (Liu et al. 2016, §2.2): matching, then boxes, classes and hard negatives.

*Matching*: each default box gets the true box that overlaps it most, if by at least `min_iou`; then each true box gets
the default box that overlaps it most, so that none is left out. *Loss*: smooth L1 of the offsets of matched boxes, plus
cross-entropy of the classes of matched boxes and of *hard negatives*: of the unmatched boxes of each picture only those
with the largest loss count, three for each matched one. Almost all default boxes are background, which would otherwise
dominate. The sum is divided by the number of matched boxes in the batch, or the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from limner.models.boxes import box_iou, encode_boxes
from limner.models.detector import Detector, Predictions
from limner.validation import Range, Validated

__all__ = ["MultiBoxLoss", "match"]


def match(
    default_boxes: Float[Tensor, "D 4"], boxes: Float[Tensor, "B N 4"], valid: Bool[Tensor, "B N"], min_iou: float
) -> Int64[Tensor, "B D"]:
    """Return the index of the true box of each default box, -1 for the background. `valid` is False for padding."""
    iou = box_iou(boxes, default_boxes).masked_fill(~valid[..., None], -1)
    overlap, matches = iou.max(1)
    matches = matches.masked_fill(overlap < min_iou, -1)
    index = torch.arange(boxes.shape[1], device=boxes.device).expand(valid.shape).masked_fill(~valid, -1)
    # Two true boxes may share their best default box: the last one gets it.
    best = torch.full_like(matches, -1).scatter_reduce(1, iou.argmax(2), index, "amax")
    return torch.where(best >= 0, best, matches)


@dataclass(frozen=True, kw_only=True)
class MultiBoxLoss(Validated):
    """Loss of boxes, classes and attributes.

    A batch has "pixels" uint8 [B, 3, S, S], "boxes" [B, N, 4] in pixels, "labels" int64 [B, N], 0 for padding, and
    "attributes" int64 [B, N, 2] if the model predicts any.

    Args:
        min_iou: least overlap of a default box with the true box that it predicts.
        negatives: hard negatives for each matched default box.
    """

    min_iou: Annotated[float, Range(0, 1)] = 0.5
    negatives: Annotated[float, Range(0, 10**4)] = 3.0

    def __call__(
        self, model: Detector, batch: Mapping[str, Tensor], step: int, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses = self.losses(model(batch["pixels"]), batch)
        return torch.stack([*losses.values()]).sum(), {name: loss.detach() for name, loss in losses.items()}

    def losses(self, predictions: Predictions, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of the loss by name."""
        boxes, labels = batch["boxes"], batch["labels"]
        matches = match(predictions.default_boxes, boxes, labels > 0, self.min_iou)
        matched = matches >= 0
        picture, default_box = matched.nonzero(as_tuple=True)
        truth = picture, matches[matched]
        count = matched.sum().clamp_min(1)
        offsets = encode_boxes(boxes[truth], predictions.default_boxes[default_box])
        targets = torch.zeros_like(matches)
        targets[matched] = labels[truth]
        errors = F.cross_entropy(predictions.logits.transpose(1, 2), targets, reduction="none")
        order = errors.detach().masked_fill(matched, -torch.inf).argsort(1, descending=True)
        is_hard = order.argsort(1) < self.negatives * matched.sum(1, keepdim=True)
        losses = {
            "boxes": F.smooth_l1_loss(predictions.offsets[matched], offsets, reduction="sum") / count,
            "classes": errors[matched | is_hard].sum() / count,
        }
        if predictions.attributes:
            values = batch["attributes"][truth]
            losses["attributes"] = torch.stack(
                [
                    F.cross_entropy(logits[matched], values[:, i], reduction="sum") / count
                    for i, logits in enumerate(predictions.attributes)
                ]
            ).sum()
        return losses
