"""The contrastive model that reranks drawings: CLIP's form (Radford et al. 2021; Ramesh et al. §2.6).

A vision transformer reads the picture, a causal text transformer the caption; each gives one vector of
unit length, and `exp(log_scale)` times their product is the logit of "these two belong together".

Shapes: B batch, H x W pixels, T text positions, D width, E embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from limner.errors import UserError
from limner.layers.masked import MaskedAttention
from limner.models.transformer import Block
from limner.ranges import Checked, OutOfRange, Range
from limner.text import PAD

MAX_LOG_SCALE = log(100)  # the temperature is learned and clipped, as in CLIP


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(Checked):
    """Sizes of the two towers.

    Args:
        text_vocab, text_len: of the captions' tokens.
        size, patch: sides of the picture and of a ViT patch in pixels.
        width, depth, heads: of both towers.
        embedding: E.
    """

    text_vocab: Annotated[int, Range(2, 2**24)] = 16_384
    text_len: Annotated[int, Range(1, 2**14)] = 256
    size: Annotated[int, Range(1, 4_096)] = 256
    patch: Annotated[int, Range(1, 4_096)] = 16
    width: Annotated[int, Range(4, 2**16)] = 512
    depth: Annotated[int, Range(1, 4_096)] = 12
    heads: Annotated[int, Range(1, 2**12)] = 8
    embedding: Annotated[int, Range(1, 2**16)] = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise OutOfRange("width", f"must be a multiple of heads, {self.heads}, not {self.width}")

    def build(self) -> Contrastive:
        """Raises `UserError` where patches do not fill the picture, whose size another model may have decided."""
        if self.size % self.patch:
            raise UserError(
                f"the contrastive model's patch must divide the picture's {self.size} pixels, not {self.patch}"
            )
        return Contrastive(self)


class Contrastive(nn.Module):
    """`encode_image` and `encode_text` give unit vectors; `scale()` is the inverse temperature."""

    causal: Tensor
    waves: Tensor
    no_weight_decay = ("image_position",)

    def __init__(self, config: ContrastiveConfig) -> None:
        super().__init__()
        self.config = config
        d, side = config.width, config.size // config.patch

        def tower() -> nn.ModuleList:
            return nn.ModuleList(Block(d, config.heads) for _ in range(config.depth))

        self.patches = nn.Conv2d(3, d, config.patch, config.patch)
        self.image_position = nn.Parameter(torch.empty(side**2 + 1, d))
        nn.init.normal_(self.image_position, std=0.02)
        self.image_blocks, self.text_blocks = tower(), tower()
        self.text = nn.Embedding(config.text_vocab, d)
        self.text_position = nn.Embedding(config.text_len, d)
        self.image_norm, self.text_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.image_out = nn.Linear(d, config.embedding, bias=False)
        self.text_out = nn.Linear(d, config.embedding, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(log(1 / 0.07)))
        nn.init.normal_(self.text.weight, std=0.02)
        nn.init.normal_(self.text_position.weight, std=0.02)
        t = config.text_len
        self.register_buffer("causal", torch.ones(t, t, dtype=torch.bool, device="cpu").tril(), persistent=False)
        self.register_buffer("waves", F.pad(sinusoids(side, d), (0, 0, 1, 0)), persistent=False)
        self.everywhere = MaskedAttention(torch.ones(side**2 + 1, side**2 + 1, dtype=torch.bool, device="cpu"))

    def encode_image(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B E"]:
        """uint8 [B, 3, H, W] -> float32 [B, E] of unit length. Position 0 is the class token."""
        x = self.patches(pixels.to(self.patches.weight.dtype) / 127.5 - 1).flatten(2).transpose(1, 2)
        x = F.pad(x, (0, 0, 1, 0)) + self.image_position + self.waves
        for block in self.image_blocks:
            x = block(x, self.everywhere)
        return F.normalize(self.image_out(self.image_norm(x[:, 0])).float(), dim=-1)

    def encode_text(self, text: Int64[Tensor, "B T"]) -> Float[Tensor, "B E"]:
        """int64 [B, T] with PAD -> float32 [B, E] of unit length, read at the last token."""
        last = (text != PAD).sum(1).sub(1).clamp_min(0)
        n = int(last.max()) + 1  # causal: what follows the longest caption changes nothing
        x = self.text(text[:, :n].clamp_min(0)) + self.text_position.weight[:n]
        causal = MaskedAttention(self.causal[:n, :n])
        for block in self.text_blocks:
            x = block(x, causal)
        x = x[torch.arange(len(x), device=x.device), last]
        return F.normalize(self.text_out(self.text_norm(x)).float(), dim=-1)

    def scale(self) -> Float[Tensor, ""]:
        """The inverse of the learned temperature; `constrain` keeps it at 100 or below."""
        return self.log_scale.exp()

    @torch.no_grad()
    def constrain(self) -> None:
        """Clip the temperature after an update, not in the forward pass, where its gradient would be 0 from then on."""
        self.log_scale.clamp_(max=MAX_LOG_SCALE)


def sinusoids(side: int, width: int) -> Tensor:
    """Where each of side x side patches is (Beyer et al. 2022): [side^2, width], of the size of patch embeddings.

    Learned positions begin as small noise and stay small. A model that has only these tells "a above b"
    from "b above a" no better than a coin. Wavelengths go from two patches to four times the picture.

    On the CPU whatever the default device, so that models can be built on the meta device.
    """
    waves = torch.pi * torch.logspace(0, -1, width // 4, 2 * side, device="cpu")
    angles = torch.arange(side, device="cpu")[:, None] * waves
    axis = torch.cat([angles.sin(), angles.cos()], 1)
    both = torch.cat([axis[:, None].expand(-1, side, -1), axis.expand(side, -1, -1)], -1).flatten(0, 1)
    return F.pad(both, (0, width - both.shape[1]))
