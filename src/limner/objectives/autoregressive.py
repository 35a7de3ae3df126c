"""The prior's objective: next-token cross-entropy, 1/8 text and 7/8 image (Ramesh et al. 2021, §2.2).

The loss of each modality is divided by its number of tokens in the batch. Padding is excluded, and never a target. All
micro-batches of a batch divide by the same number of text tokens.

Shapes: B batch, T text positions, S image positions.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Num
from torch import Tensor

from limner.models.transformer import Transformer
from limner.objectives.cross_entropy import linear_cross_entropy
from limner.text import PAD
from limner.validation import Range, Validated

__all__ = ["Autoregressive"]


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Validated):
    """Weighted sum of the cross-entropies of text and image tokens (§2.2).

    Args:
        text_weight: weight of the text loss; the image loss has weight 1 - text_weight.
        logit_operands: format of the factors in the products of the output matrices: fp32 (App. D.2), or autocast's,
            which is faster where autocast has 16 bits. The products are summed and stored in fp32.
    """

    text_weight: Annotated[float, Range(0, 1)] = 1 / 8
    logit_operands: Literal["fp32", "autocast"] = "fp32"

    def __call__(
        self, model: Transformer, batch: dict[str, Tensor], step: int, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        return self.loss(model, batch, model.run(self.inputs(model, batch)))

    def inputs(self, model: Transformer, batch: dict[str, Tensor]) -> Float[Tensor, "B n D"]:
        """Return the input of the model's first block: [B, n, D] with n = T + 1 + S. A batch may have the tokens of
        given pictures, {"given": Long [B, S]} with PAD."""
        text = torch.cat([batch["text"], batch["given"]], 1) if "given" in batch else batch["text"]
        return model.inputs(text, batch["image"])

    def loss(
        self, model: Transformer, batch: dict[str, Tensor], x: Float[Tensor, "B n D"]
    ) -> tuple[Float[Tensor, ""], dict[str, Num[Tensor, ""]]]:
        """Return loss and metrics from the output of the model's last block, [B, n, D]."""
        text, image = batch["text"], batch["image"]
        by_text, by_image = model.outputs(x, text)
        expected = text[:, 1:].flatten()  # PAD is negative, which the loss ignores
        per_sample = (batch if "text_tokens" in batch else self.batch_stats(batch))["text_tokens"]
        tokens = per_sample.sum().clamp_min(1e-9)  # 0 if all captions are empty
        rounds = self.logit_operands == "autocast" and torch.is_autocast_enabled(text.device.type)
        with torch.autocast(text.device.type, enabled=rounds):  # keeps the outer format
            text_loss = linear_cross_entropy(by_text.flatten(0, 1), model.head.text, expected) / tokens
            image_loss = linear_cross_entropy(by_image.flatten(0, 1), model.head.image, image.flatten()) / image.numel()
        loss = self.text_weight * text_loss + (1 - self.text_weight) * image_loss
        return loss, {"text": text_loss.detach(), "image": image_loss.detach()}

    def batch_stats(self, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " B"]]:
        """Return statistics of the whole batch for its micro-batches: {"text_tokens": mean targets per text, [B]}."""
        targets = (batch["text"][:, 1:] != PAD).sum()
        return {"text_tokens": (targets / len(batch["text"])).expand(len(batch["text"]))}
