"""Reranking: of N drawings of a caption, keep those the contrastive model likes best (§2.6, Fig. 6).

Not in the paper: the prior has a say. The contrastive model tells captions apart, and the prior knows which
drawings are malformed; so what the prior found likely may count in a score, with a weight that a model
brings along. Where a part of the picture was given, it is the whole score: the contrastive model hardly knows
whether two parts of a picture go together (docs/log/2026-11-26.md, "Ranking by likelihood where a part" compares).

Shapes: B captions, N candidates, T text positions, S image positions, H x W pixels.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from limner.errors import UserError
from limner.models.contrastive import Contrastive


@torch.inference_mode()
def scores(
    model: Contrastive, text: Int64[Tensor, "B T"], pictures: UInt8[Tensor, "B N 3 H W"]
) -> Float[Tensor, "B N"]:
    """Cosine of caption and picture: text [B, T], pictures uint8 [B, N, 3, H, W] -> [B, N].

    Raises `UserError` if one is not finite.
    """
    texts = model.encode_text(text)
    images = model.encode_image(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
    found = (images @ texts[..., None]).squeeze(-1)
    if not found.isfinite().all():
        raise UserError(
            "the scores of the contrastive model are not finite, so its weights are damaged or have diverged: take "
            "another copy"
        )
    return found


def best(score: Float[Tensor, "B N"], k: int) -> Int64[Tensor, "B K"]:
    """Indices of the k best candidates, best first: [B, N] -> [B, k]. Ties keep their order."""
    return score.argsort(dim=1, descending=True, stable=True)[:, :k]


def distinct_first(order: Int64[Tensor, "B N"], tokens: Int64[Tensor, "B N S"]) -> Int64[Tensor, "B N"]:
    """The same order of candidates, but those that repeat a better one's tokens come after all others."""
    rows = []
    for row, drawn in zip(order.tolist(), tokens, strict=True):
        kept = set({drawn[i].numpy().tobytes(): i for i in reversed(row)}.values())  # the best of those that are alike
        rows.append([*(i for i in row if i in kept), *(i for i in row if i not in kept)])
    return torch.tensor(rows, dtype=order.dtype).view_as(order)  # of no captions, too
