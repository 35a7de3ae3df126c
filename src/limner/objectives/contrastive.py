"""The symmetric contrastive loss (Radford et al. 2021, Figure 3).

Each picture of a batch is classified among its captions, and each caption among its pictures.

Runs train with `HardContrastiveLoss` (`hard_negatives.py`), which equals this loss if captions differ, one process has
the whole batch, and there are no further negatives.

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

    Metrics: `accuracy` is the share of pictures that rank their caption first, `kept` the share of captions that rank
    their picture first.
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
    """Return the logits of each row for all choices, in fp32: bf16 has a spacing of 1/4 at 40."""
    with torch.autocast(rows.device.type, enabled=False):
        return scale * rows @ choices.T
