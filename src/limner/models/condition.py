"""Conditioning of the prior on a picture: it draws another picture like it, such as the same icon in another style.

In the paper image-to-image is a pair of pictures in one, of which the upper half is given (§3.3, Figure 2d). Here what
a given picture shows at a place is added to the embedding from which the prior predicts the token at that place. The
sequence stays as short as without the picture, and the prior does not have to learn which earlier position shows the
same place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from limner.attention.sparse import DenseAttention

__all__ = ["Condition"]


class Condition(nn.Module):
    """Blocks in which all positions of the given picture see each other, and a linear layer.

    Args:
        blocks: transformer blocks of width D.
        positions: S, of a picture.
    """

    def __init__(self, blocks: Iterable[nn.Module], width: int, positions: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.attention = DenseAttention(torch.ones(positions, positions, dtype=torch.bool))

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        """Map the embeddings of the picture's tokens to what is added at the same places: [B, S, D] -> [B, S, D]."""
        for block in self.blocks:
            x = block(x, self.attention)
        return self.out(self.norm(x))
