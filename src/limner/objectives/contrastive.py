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
        logits = scale * images @ texts.T  # [B, B], a row for each picture
        own = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
        accuracy, kept = ((choices.argmax(1) == own).float().mean() for choices in (logits, logits.T))
        return loss, {"accuracy": accuracy, "kept": kept, "scale": scale.detach()}
