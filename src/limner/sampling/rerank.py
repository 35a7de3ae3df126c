"""Reranking: of N candidates of a caption, keep those the contrastive model scores highest (§2.6, Fig. 6).

An extension of the paper adds the prior's log-probability to the score, with a weight stored in the bundle: the
contrastive model recognizes what a picture shows, the prior recognizes malformed pictures. For inpainting, that
log-probability is the whole score, since the contrastive model hardly recognizes whether two parts of a picture match
(docs/log/2026-11-26.md, "Ranking by likelihood where a part" compares).

Shapes: B captions or pictures, N candidates, T text positions, S image positions, H x W pixels, E embedding.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from limner.errors import UserError
from limner.models.contrastive import CLIP

__all__ = ["best", "encode_images", "scores"]


@torch.inference_mode()
def scores(model: CLIP, text: Int64[Tensor, "B T"], pictures: UInt8[Tensor, "B N 3 H W"]) -> Float[Tensor, "B N"]:
    """Cosine similarity of captions and pictures: text [B, T], pictures uint8 [B, N, 3, H, W] -> [B, N].

    Raises `UserError` if a score is not finite.
    """
    texts = model.encode_text(text)
    images = encode_images(model, pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
    cosines = (images @ texts[..., None]).squeeze(-1)
    if not cosines.isfinite().all():
        raise UserError(
            "the scores of the contrastive model are not finite, so its weights are damaged or have diverged: use "
            "another copy"
        )
    return cosines


def encode_images(model: CLIP, pictures: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B E"]:
    """Embed square pictures uint8 [B, 3, H, W] of any size: resized by a bicubic filter, unless they fit: [B, E]."""
    size = model.config.size
    if pictures.shape[-1] != size:
        resized = F.interpolate(pictures.float(), (size, size), mode="bicubic", antialias=True)
        pictures = resized.round().clamp(0, 255).to(torch.uint8)
    return model.encode_image(pictures)


def best(score: Float[Tensor, "B N"], k: int) -> Int64[Tensor, "B K"]:
    """Indices of the k best candidates, best first: [B, N] -> [B, k]. Ties keep their order."""
    return score.argsort(dim=1, descending=True, stable=True)[:, :k]
