"""The symmetric contrastive loss (Radford et al. 2021, Figure 3).

Each picture of a batch is classified among its captions, and each caption among its pictures.

Runs train with `HardNegativeLoss` (`hard_negatives.py`), which equals this loss if captions differ, one process has
the whole batch, and there are no further negatives.

Shapes: B batch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor

from limner.models.contrastive import CLIP

__all__ = ["CLIPLoss", "logits"]


@dataclass(frozen=True, kw_only=True)
class CLIPLoss:
    """Cross-entropy over the batch in both directions.

    Metrics: `accuracy` is the share of pictures that rank their caption first, `text_to_image_acc` the share of
    captions that rank their picture first.
    """

    def __call__(
        self, model: CLIP, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        images, texts, scale = model.encode_image(batch["pixels"]), model.encode_text(batch["text"]), model.scale()
        image_logits = logits(scale, images, texts)  # [B, B], a row for each picture
        target = torch.arange(len(image_logits), device=image_logits.device)
        loss = (F.cross_entropy(image_logits, target) + F.cross_entropy(image_logits.T, target)) / 2
        accuracy, text_to_image_acc = ((x.argmax(1) == target).float().mean() for x in (image_logits, image_logits.T))
        return loss, {"accuracy": accuracy, "text_to_image_acc": text_to_image_acc, "scale": scale.detach()}


def logits(scale: Float[Tensor, ""], rows: Float[Tensor, "B E"], choices: Float[Tensor, "N E"]) -> Float[Tensor, "B N"]:
    """Return the logits of each row for all choices, in fp32: bf16 has a spacing of 1/4 at 40."""
    with torch.autocast(rows.device.type, enabled=False):
        return scale * rows @ choices.T
