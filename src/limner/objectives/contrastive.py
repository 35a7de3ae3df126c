"""The symmetric contrastive loss (Radford et al. 2021, Figure 3).

Within a batch, each picture must pick its caption and each caption its picture. Two samples that share
a caption word for word are no negatives of each other: both count as right.

Shapes: B batch, E embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from limner.models.contrastive import Contrastive


@dataclass(frozen=True, kw_only=True)
class ContrastiveLoss:
    """Cross-entropy over the batch in both directions."""

    def __call__(
        self, model: Contrastive, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        images = model.encode_image(batch["pixels"])
        texts = model.encode_text(batch["text"])
        logits = model.scale() * images @ texts.T
        text = batch["text"]
        same = (text[:, None] == text[None]).all(-1).float()
        target = same / same.sum(1, keepdim=True)
        loss = -(target * logits.log_softmax(1) + target * logits.log_softmax(0)).sum() / (2 * len(logits))
        right = same.gather(1, logits.argmax(1, keepdim=True)).mean()
        return loss, {"accuracy": right.detach(), "scale": model.scale().detach()}
