"""The symmetric contrastive loss (Radford et al. 2021, Figure 3).

Within a batch, each picture must pick its caption and each caption its picture; the negatives are the other pairs.

Runs train with `HardContrastiveLoss` (`hard_negatives.py`): this loss where captions differ, one process has the whole
batch, and nothing harder is to choose from.

Shapes: B batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor

from limner.models.contrastive import Contrastive


@dataclass(frozen=True, kw_only=True)
class ContrastiveLoss:
    """Cross-entropy over the batch in both directions.

    `accuracy` is how often a picture picks its caption, `kept` how often a caption picks its picture.
    """

    def __call__(
        self, model: Contrastive, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        images, texts, scale = model.encode_image(batch["pixels"]), model.encode_text(batch["text"]), model.scale()
        to_choose = logits(scale, images, texts)  # [B, B], a row for each picture
        own = torch.arange(len(to_choose), device=to_choose.device)
        loss = (F.cross_entropy(to_choose, own) + F.cross_entropy(to_choose.T, own)) / 2
        accuracy, kept = ((choices.argmax(1) == own).float().mean() for choices in (to_choose, to_choose.T))
        return loss, {"accuracy": accuracy, "kept": kept, "scale": scale.detach()}


def logits(scale: Float[Tensor, ""], rows: Float[Tensor, "B E"], choices: Float[Tensor, "N E"]) -> Float[Tensor, "B N"]:
    """Each row's logits for all choices, in 32 bits: in bf16 those around 40 would be multiples of 1/4."""
    with torch.autocast(rows.device.type, enabled=False):
        return scale * rows @ choices.T
