"""The symmetric contrastive loss (Radford et al. 2021, Figure 3).

Within a batch, each picture must pick its caption and each caption its picture. Two samples that share
a caption word for word are no negatives of each other: both count as right. A batch may bring
`distractors`, wrong captions for each picture, among which it must pick as well.

Shapes: B batch, K distractors, T text positions, E embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from limner.models.contrastive import Contrastive
from limner.text import PAD


@dataclass(frozen=True, kw_only=True)
class ContrastiveLoss:
    """Cross-entropy over the batch in both directions; `accuracy` is how often a picture picks rightly."""

    def __call__(
        self, model: Contrastive, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        images, text = model.encode_image(batch["pixels"]), batch["text"]
        logits = model.scale() * images @ model.encode_text(text).T
        same = (text[:, None] == text[None]).all(-1).float()
        target = same / same.sum(1, keepdim=True)
        choices = logits
        if "distractors" in batch:
            choices = torch.cat([logits, _distractor_logits(model, images, batch["distractors"])], 1)
        by_picture = choices.log_softmax(1)[:, : len(text)]
        loss = -(target * by_picture + target * logits.log_softmax(0)).sum() / (2 * len(text))
        picked = choices.argmax(1, keepdim=True)
        right = F.pad(same, (0, choices.shape[1] - len(text))).gather(1, picked).mean()
        return loss, {"accuracy": right.detach(), "scale": model.scale().detach()}


def _distractor_logits(model: Contrastive, images: Tensor, distractors: Tensor) -> Tensor:
    """Each picture against its own distractors [B, K, T] -> [B, K]; rows of padding alone are no choice."""
    texts = model.encode_text(distractors.flatten(0, 1)).unflatten(0, distractors.shape[:2])
    logits = model.scale() * (texts @ images[..., None]).squeeze(-1)
    return logits.masked_fill((distractors == PAD).all(-1), -torch.inf)
