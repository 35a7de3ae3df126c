"""Encoder of the dVAE that sees each patch alone, so that equal patches have equal codes in every context.

For small, flat pictures, where the codes of other encoders depend on context that a prior cannot predict
(docs/log/2026-11-22.md, "Encoder that sees one patch alone");
not in the paper.

Shapes: B batch, H x W pixels, h x w grid of patches, V codes.
"""

import torch
from torch import Tensor, nn


class PatchEncoder(nn.Module):
    """Mapped pixels [B, 3, H, W] -> logits [B, V, h, w], by an encoder's `blocks` on every patch as a picture.

    Args:
        blocks: [B, 3, patch, patch] -> [B, V, 1, 1]; its parameters keep their names.
        patch: side of a patch in pixels.
    """

    def __init__(self, blocks: nn.Module, patch: int) -> None:
        super().__init__()
        self.blocks, self.patch = blocks, patch

    def forward(self, x: Tensor) -> Tensor:
        b, _, height, width = x.shape
        h, w = height // self.patch, width // self.patch
        patches = x.view(b, 3, h, self.patch, w, self.patch).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        logits = self.blocks(patches.contiguous(memory_format=torch.channels_last))
        return logits.view(b, h, w, -1).permute(0, 3, 1, 2)
