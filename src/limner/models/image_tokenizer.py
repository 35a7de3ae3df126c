"""Base class of image tokenizers. Shapes: B batch, H x W pixels, S tokens, V codes, D numbers of a code."""

from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from limner.attention.patterns import Grid
from limner.progress import Advance

__all__ = ["ImageTokenizer"]


class ImageTokenizer(nn.Module):
    """An encoder and a decoder. `config` has `size` (pixels of a side), `grid` (rows and columns), `vocab`, `depth`
    (residual blocks), `width` (channels at full resolution, which limit the decoder's batch), and `build`."""

    config: Any

    def tokenize(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Int64[Tensor, "B S"]:
        """Encode pictures to tokens."""
        raise NotImplementedError

    def decode_tokens(self, tokens: Int64[Tensor, "B S"], grid: Grid | None = None) -> UInt8[Tensor, "B 3 H W"]:
        """Decode tokens to pictures."""
        raise NotImplementedError

    def fixed_codes(self) -> Float[Tensor, "V D"] | None:
        """Return the codes if gradients do not train them, so that `fit_codebook` sets them; else None."""
        return None

    def fit_codebook(
        self, pixels: UInt8[Tensor, "B 3 H W"], generator: torch.Generator, progress: Advance | None = None
    ) -> None:
        """Set the fixed codes from training pictures, before the first update. Each round advances `progress`."""
        raise NotImplementedError
