"""Reranking: of N drawings of a caption, keep those the contrastive model likes best (§2.6, Fig. 6).

Where a part of the picture was given, keep those that the prior itself finds likeliest: the contrastive model knows
whether caption and picture go together, and hardly whether two parts of a picture do (docs/LOG.md compares).

Shapes: B captions, N candidates, T text positions, S image positions, H x W pixels.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from limner.errors import UserError
from limner.layers.cross_entropy import linear_cross_entropy
from limner.models.contrastive import Contrastive
from limner.models.transformer import Transformer

_POSITIONS = 1 << 14  # of text and image that the prior reads at once


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


@torch.inference_mode()
def likelihoods(prior: Transformer, text: Int64[Tensor, "B T"], tokens: Int64[Tensor, "B N S"]) -> Float[Tensor, "B N"]:
    """Log-probability of a picture's tokens given its caption, in nats per token: text [B, T], tokens [B, N, S] ->
    fp32 [B, N]."""
    together = max(1, _POSITIONS // (text.shape[1] + tokens.shape[2]))
    found = []
    for caption, drawn in zip(text, tokens, strict=True):
        for part in drawn.split(together):
            _, states = prior.states(caption.expand(len(part), -1), part)
            found += [-linear_cross_entropy(x, prior.head.image, own) for x, own in zip(states, part, strict=True)]
    return torch.stack(found).view(tokens.shape[:2]) / tokens.shape[2]


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
