"""The symmetric contrastive loss (Radford et al. 2021, Figure 3).

Within a batch, each picture must pick its caption and each caption its picture. Two samples that share
a caption word for word are no negatives of each other: both count as right. Both sides may get more to choose from,
which is harder (`hard_negatives.py`): wrong captions that the batch brings, and spoiled copies of the pictures.

Where several processes share a batch, the pictures and captions of all are to choose from (`across`).

Shapes: B batch (of a process), N that of all processes, M spoiled copies of a picture, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from limner.models.contrastive import Contrastive
from limner.objectives.hard_negatives import distractor_logits, spoil, spoiled_logits
from limner.ranges import Checked, Range


@dataclass(frozen=True, kw_only=True)
class ContrastiveLoss(Checked):
    """Cross-entropy over the batch in both directions, with M = `spoiled` copies of each picture.

    `accuracy` is how often a picture picks its caption, `kept` how often a caption picks its picture.
    """

    spoiled: Annotated[int, Range(0, 1_000)] = 0

    def __call__(
        self, model: Contrastive, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        text, pixels = batch["text"], batch["pixels"]
        copies = [spoil(pixels, shift, generator) for shift in range(self.spoiled)]
        images, *wrong = model.encode_image(torch.cat([pixels, *(copy for copy, _ in copies)])).split(len(text))
        texts, scale = model.encode_text(text), model.scale()
        captions, pictures = scale * images @ join(texts).T, scale * texts @ join(images).T  # to choose from, [B, N]
        same = (text[:, None] == join(text)[None]).all(-1).float()
        target = same / same.sum(1, keepdim=True)
        if "distractors" in batch:
            captions = torch.cat([captions, distractor_logits(model, images, batch["distractors"])], 1)
        if wrong:
            intact = torch.stack([unchanged for _, unchanged in copies])
            pictures = torch.cat([pictures, spoiled_logits(scale, texts, torch.stack(wrong), intact)], 1)
        n = same.shape[1]
        picked = captions.log_softmax(1)[:, :n] + pictures.log_softmax(1)[:, :n]
        loss = -(target * picked).sum() / (2 * len(text))
        found = {"accuracy": _accuracy(captions, same), "kept": _accuracy(pictures, same), "scale": scale}
        return loss, {name: value.detach() for name, value in found.items()}


def _accuracy(choices: Tensor, same: Tensor) -> Tensor:
    """How often the highest of [B, N + n] is among the right ones, [B, N]."""
    picked = choices.argmax(1, keepdim=True)
    return F.pad(same, (0, choices.shape[1] - same.shape[1])).gather(1, picked).mean()
