"""CLIP, which reranks generated pictures (Radford et al. 2021; Ramesh et al. §2.6).

A vision transformer encodes the picture, a causal text transformer the caption, each as one vector of unit length.
The logit of a pair is `exp(log_scale)` times their inner product.

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

from limner.attention.sparse import DenseAttention
from limner.errors import UserError
from limner.models.patch_embedding import drop_patches, sinusoids
from limner.models.transformer import MLP, Block
from limner.numerics.precision import upcast
from limner.text import PAD
from limner.validation import InvalidSetting, Range, Validated

__all__ = ["CLIP", "SIZES", "CLIPConfig", "QuickGELU"]

MAX_LOG_SCALE = log(100)  # the temperature is learned and clipped, as in CLIP


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(Validated):
    """Sizes of the two towers.

    Args:
        text_vocab, text_len: vocabulary and number of the captions' tokens.
        size, patch: sides of the picture and of a ViT patch in pixels.
        width, depth, heads: sizes of the picture's tower, and of the caption's if `text_tower` is None.
        text_tower: width, depth and heads of the caption's tower.
        embedding: E.
        patch_dropout: share of patches that training drops at random for each picture (Li et al. 2022).
        ln_pre: normalize class token and patches, with positions, before the blocks (Radford et al. 2021; the
            "layer-norm after the patch embedding" of Wortsman et al. 2023, §3.2). The bundled models lack this norm.
        sinusoids: add fixed sinusoids to the learned positions, which remain small in short runs on small pictures.
        quick_gelu: x sigmoid(1.702 x) in place of GELU, as in OpenAI's published weights (`published_clip.py`).
        layer_scale, qk_norm: see `TransformerConfig`.
    """

    text_vocab: Annotated[int, Range(2, 2**24)] = 16_384
    text_len: Annotated[int, Range(1, 2**14)] = 256
    size: Annotated[int, Range(1, 4_096)] = 256
    patch: Annotated[int, Range(1, 4_096)] = 16
    width: Annotated[int, Range(4, 2**16)] = 512
    depth: Annotated[int, Range(1, 4_096)] = 12
    heads: Annotated[int, Range(1, 2**12)] = 8
    embedding: Annotated[int, Range(1, 2**16)] = 512
    text_tower: Annotated[tuple[int, int, int] | None, Range(1, 2**16)] = None
    patch_dropout: Annotated[float, Range(0, lt=1)] = 0.0
    ln_pre: bool = True
    sinusoids: bool = False
    quick_gelu: bool = False
    layer_scale: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for width, _, heads in (self.tower, self.text_tower or self.tower):
            if width % heads:
                raise InvalidSetting("width", f"must be a multiple of heads, {heads}, not {width}")

    @property
    def tower(self) -> tuple[int, int, int]:
        """Width, depth and heads of the picture's tower."""
        return self.width, self.depth, self.heads

    @property
    def grid(self) -> tuple[int, int]:
        """Grid of ViT patches."""
        return self.size // self.patch, self.size // self.patch

    def build(self) -> CLIP:
        """Build the model. Raises `UserError` if the patch does not divide the picture, whose size the dVAE may set."""
        if self.size % self.patch:
            raise UserError(f"the CLIP model's patch must divide the picture size {self.size}: {self.patch} does not")
        return CLIP(self)


#: Sizes of ViT-B/32, L/14 and H/14 as OpenCLIP trains them, and one for two cores, with patch dropout.
SIZES = {
    name: CLIPConfig(
        size=size, patch=patch, width=width, depth=depth, heads=heads, text_tower=text, embedding=embedding,
        text_vocab=16_384, text_len=77, patch_dropout=0.5,
    )
    for name, size, patch, (width, depth, heads), text, embedding in (
        ("tiny", 48, 8, (128, 4, 4), (128, 4, 4), 128),
        ("B", 224, 32, (768, 12, 12), (512, 12, 8), 512),
        ("L", 224, 14, (1_024, 24, 16), (768, 12, 12), 768),
        ("H", 224, 14, (1_280, 32, 16), (1_024, 24, 16), 1_024),
    )
}  # fmt: skip


class QuickGELU(MLP):
    """`MLP` with x sigmoid(1.702 x), an approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden * torch.sigmoid(1.702 * hidden))


class CLIP(nn.Module):
    """Two encoders, `encode_image` and `encode_text`, and a learned inverse temperature, `scale`."""

    causal: Tensor
    position_sinusoids: Tensor
    no_weight_decay = ("image_position",)

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.config = config
        d, side = config.width, config.grid[0]

        def tower(width: int, depth: int, heads: int) -> nn.ModuleList:
            blocks = [Block(width, heads, config.layer_scale, config.qk_norm) for _ in range(depth)]
            for block in blocks if config.quick_gelu else ():
                block.mlp.branch = QuickGELU(width)
            return nn.ModuleList(blocks)

        text_tower = config.text_tower or config.tower
        w = text_tower[0]
        self.patches = nn.Conv2d(3, d, config.patch, config.patch)
        self.image_position = nn.Parameter(torch.empty(side**2 + 1, d))
        nn.init.normal_(self.image_position, std=0.02)
        self.ln_pre = nn.LayerNorm(d) if config.ln_pre else nn.Identity()
        self.image_blocks, self.text_blocks = tower(*config.tower), tower(*text_tower)
        self.text = nn.Embedding(config.text_vocab, w)
        self.text_position = nn.Embedding(config.text_len, w)
        self.image_norm, self.text_norm = nn.LayerNorm(d), nn.LayerNorm(w)
        self.image_out = nn.Linear(d, config.embedding, bias=False)
        self.text_out = nn.Linear(w, config.embedding, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(log(1 / 0.07)))
        nn.init.normal_(self.text.weight, std=0.02)
        nn.init.normal_(self.text_position.weight, std=0.02)
        t = config.text_len
        self.register_buffer("causal", torch.ones(t, t, dtype=torch.bool, device="cpu").tril(), persistent=False)
        self.register_buffer("position_sinusoids", F.pad(sinusoids(side, d), (0, 0, 1, 0)), persistent=False)
        n_kept = max(1, round((1 - config.patch_dropout) * side**2))
        self.full_attention, self.kept_attention = (
            DenseAttention(torch.ones(n + 1, n + 1, dtype=torch.bool, device="cpu")) for n in (side**2, n_kept)
        )

    def encode_image(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B E"]:
        """uint8 [B, 3, H, W] -> float32 (or float64) [B, E] of unit length. Position 0 is the class token, a part of
        `image_position`."""
        x = self.patches(pixels.to(self.patches.weight.dtype) / 127.5 - 1).flatten(2).transpose(1, 2)
        x = F.pad(x, (0, 0, 1, 0)) + self.image_position
        if self.config.sinusoids:
            x = x + self.position_sinusoids
        attention_fn = self.full_attention
        if self.training and self.config.patch_dropout:
            attention_fn = self.kept_attention
            x = drop_patches(x, len(attention_fn.mask) - 1)
        x = self.ln_pre(x)
        for block in self.image_blocks:
            x = block(x, attention_fn)
        return F.normalize(upcast(self.image_out(self.image_norm(x[:, 0]))), dim=-1)

    def encode_text(self, text: Int64[Tensor, "B T"]) -> Float[Tensor, "B E"]:
        """int64 [B, T] with PAD -> float32 (or float64) [B, E] of unit length, read at the last token."""
        n = int((text != PAD).sum(1).max())  # causal attention: positions after the longest caption have no effect
        return self.encode_padded(text[:, : max(1, n)])

    def encode_padded(self, text: Int64[Tensor, "B T"]) -> Float[Tensor, "B E"]:
        """Compute `encode_text` at all positions, so that shapes do not depend on values."""
        last, n = (text != PAD).sum(1).sub(1).clamp_min(0), text.shape[1]
        x = self.text(text.clamp_min(0)) + self.text_position.weight[:n]
        causal = DenseAttention(self.causal[:n, :n])
        for block in self.text_blocks:
            x = block(x, causal)
        x = x[torch.arange(x.shape[0], device=x.device), last]
        return F.normalize(upcast(self.text_out(self.text_norm(x))), dim=-1)

    def scale(self) -> Float[Tensor, ""]:
        """Return the inverse of the learned temperature, which `constrain` bounds by 100."""
        return self.log_scale.exp()

    @torch.no_grad()
    def constrain(self) -> None:
        """Clip the temperature after an update; clipped in the forward pass, its gradient would stay 0."""
        self.log_scale.clamp_(max=MAX_LOG_SCALE)
