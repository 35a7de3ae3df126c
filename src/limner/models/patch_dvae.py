"""Discrete VAE of patches: tokens are the nearest of V patch codes, and a decoder joins them.

For small, flat pictures and few processors; not in the paper
(docs/log/2026-11-23.md, "dVAE of patches for icons" compares). The codes are the centers of a
k-means clustering, which takes minutes and uses all codes from the first step on; the paper's encoder learns codes by a
relaxation. A code depends on its own patch alone, which a prior learns fastest. The decoder pastes the patches and
corrects them from adjacent patches, by residual blocks at the grid's resolution. Large patches leave visible borders,
which blocks at the picture's resolution remove:

    tokens = nearest of `codes` to each patch;   joined = pasted codes + conv 1x1(blocks(conv 1x1(pasted codes)))
    pictures = joined + conv 3x3(pixel_blocks(conv 3x3(joined)))

Shapes: B batch, H x W pixels, h x w grid of patches of P x P pixels, V codes, D = 3 P^2 numbers of a patch, S = h * w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from limner.attention.patterns import Grid
from limner.models.dvae import EPSILON, Conv2d, ConvBlock, DVAEConfig, map_pixels, unmap_pixels
from limner.models.image_tokenizer import ImageTokenizer
from limner.numerics.precision import upcast
from limner.progress import Advance
from limner.validation import InvalidSetting, Range, Validated

__all__ = ["AnyDVAEConfig", "PatchDVAE", "PatchDVAEConfig", "kmeans", "nearest_code"]

KMEANS_ITERS = 15  # iterations of Lloyd's algorithm
_MAX_FLAT_RANGE = 0.01  # largest difference within a channel of a patch that is of one color: three levels of 255
_PIXEL_WIDTH = 32  # width of the pixel blocks: each pixel costs what a position of the grid costs elsewhere
_PART = 1_024  # patches per product with all codes: the distances fit into the processor's cache


@dataclass(frozen=True, kw_only=True)
class PatchDVAEConfig(Validated):
    """A dVAE of patches.

    Args:
        size: side of the square picture in pixels, a multiple of `patch`.
        patch: side of a patch in pixels.
        vocab: codes (V).
        width, blocks: width and number of the decoder's residual blocks at the grid's resolution.
        pixel_blocks: number of residual blocks at the picture's resolution.
    """

    size: Annotated[int, Range(1, 4_096)] = 64
    patch: Annotated[int, Range(1, 64)] = 4
    vocab: Annotated[int, Range(2, 2**20)] = 8_192
    width: Annotated[int, Range(4, 4_096)] = 192
    blocks: Annotated[int, Range(1, 256)] = 4
    pixel_blocks: Annotated[int, Range(0, 256)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % self.patch:
            raise InvalidSetting("size", f"must be a multiple of patch, {self.patch}, not {self.size}")

    @property
    def depth(self) -> int:
        """Number of residual blocks of the decoder."""
        return self.blocks + self.pixel_blocks

    @property
    def grid(self) -> tuple[int, int]:
        return self.size // self.patch, self.size // self.patch

    def build(self) -> PatchDVAE:
        return PatchDVAE(self)


class PatchDVAE(ImageTokenizer):
    """Codes and decoder, for any size that is a multiple of the patch.

    `codes` [V, D] are patches in the range of `map_pixels`: black before `fit_codebook`, and constant in training.
    """

    codes: Tensor

    def __init__(self, config: PatchDVAEConfig) -> None:
        super().__init__()
        self.config = config
        numbers, width = 3 * config.patch**2, config.width
        self.register_buffer("codes", torch.full((config.vocab, numbers), EPSILON))
        self.input = Conv2d(numbers, width, 1, gain=4.0)  # inputs have a standard deviation of about 1/4
        self.blocks = nn.Sequential(*(ConvBlock(width, width, (1, 3, 3, 3), 0.5, 2**0.5) for _ in range(config.blocks)))
        self.output = Conv2d(width, numbers, 1, gain=0.01)
        width, n = _PIXEL_WIDTH, config.pixel_blocks
        pixel_blocks = (ConvBlock(width, width, (1, 3, 3, 3), 0.5, 2**0.5) for _ in range(n))
        layers = [Conv2d(3, width, 3), *pixel_blocks, nn.ReLU(), Conv2d(width, 3, 3, gain=0.01)] if n else []
        self.refine = nn.Sequential(*layers)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @torch.no_grad()
    def tokenize(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Int64[Tensor, "B S"]:
        """Return the nearest code of each patch: uint8 [B, 3, H, W] -> int64 [B, S]."""
        with torch.autocast(pixels.device.type, enabled=False):  # bf16 cannot resolve distances between codes
            codes = upcast(self.codes)
            return nearest_code(self._patches(pixels).flatten(0, 1).to(codes.dtype), codes).view(len(pixels), -1)

    def decode(self, tokens: Int64[Tensor, "B h w"]) -> Float[Tensor, "B 3 H W"]:
        """Decode codes to float32 (or float64) [B, 3, H, W], pixels in the range of `map_pixels`."""
        pasted = F.embedding(tokens, self.codes).movedim(-1, 1)
        x = self.blocks(self.input((pasted - 0.5).to(self.input.w.dtype)))
        joined = F.pixel_shuffle(upcast(pasted) + upcast(self.output(F.relu(x))), self.config.patch)
        if not self.config.pixel_blocks:
            return joined
        return joined + upcast(self.refine((joined - 0.5).to(self.input.w.dtype)))

    @torch.no_grad()
    def decode_tokens(self, tokens: Int64[Tensor, "B S"], grid: Grid | None = None) -> UInt8[Tensor, "B 3 H W"]:
        """Decode tokens to pictures: int64 [B, S] -> uint8 [B, 3, H, W]."""
        return unmap_pixels(self.decode(tokens.unflatten(1, grid or self.config.grid)))

    def fixed_codes(self) -> Float[Tensor, "V D"]:
        return self.codes

    @torch.no_grad()
    def fit_codebook(
        self,
        pixels: UInt8[Tensor, "B 3 H W"],
        generator: torch.Generator,
        progress: Advance | None = None,
        samples: int = 200_000,
    ) -> None:
        """Set `codes` to the cluster centers of about `samples` patches of uint8 [B, 3, H, W], on the CPU.

        An eighth of the codes is reserved for patches of one color, which are most of a flat picture; otherwise the
        nearest code of a flat area has traces of an edge. A color is sampled in proportion to the root of its
        frequency, another patch in proportion to its contrast. Each of `KMEANS_ITERS` iterations advances `progress`.
        """
        textured, colors, per_picture = [], [], -(-samples // len(pixels))
        for picture in pixels:
            patches = self._patches(picture[None])[0]
            channels = patches.unflatten(1, (3, -1))
            flat = (channels.amax(2) - channels.amin(2)).amax(1) <= _MAX_FLAT_RANGE
            colors.append(channels[flat].mean(2))
            others = patches[~flat]
            if len(others):
                contrast = channels[~flat].std(2).mean(1) + 0.01
                textured.append(others[torch.multinomial(contrast, min(per_picture, len(others)), generator=generator)])
        vocab = self.config.vocab
        plain = self._flat_codes(torch.cat(colors), max(1, vocab // 8) if textured else vocab, samples // 8, generator)
        patches = torch.cat(textured) if textured else plain
        rest = [kmeans(patches, vocab - len(plain), generator, progress)] if len(plain) < vocab else []
        self.codes.copy_(torch.cat([plain, *rest]))

    def _flat_codes(
        self, colors: Float[Tensor, "N 3"], count: int, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "F D"]:
        """Return at most `count` codes of one color each, colors of pictures, so that these are nearest."""
        distinct, counts = torch.unique(unmap_pixels(colors), dim=0, return_counts=True)
        if len(distinct) <= count:  # also if there is no flat patch
            chosen = distinct
        else:
            sampled = torch.multinomial(counts.sqrt(), samples, replacement=True, generator=generator)
            chosen = unmap_pixels(kmeans(map_pixels(distinct[sampled]), count, generator))
        return map_pixels(chosen).repeat_interleave(self.config.patch**2, 1)

    def _patches(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B S D"]:
        return F.pixel_unshuffle(map_pixels(pixels), self.config.patch).flatten(2).mT


def nearest_code(points: Float[Tensor, "N D"], codes: Float[Tensor, "V D"]) -> Int64[Tensor, " N"]:
    """Return the index of the row of `codes` that is nearest to each point."""
    half = codes.square().sum(1) / 2  # half the squared distance is |p|^2 / 2 - p.c + |c|^2 / 2
    return torch.cat([torch.addmm(half, part, codes.T, alpha=-1).min(1).indices for part in points.split(_PART)])


def kmeans(
    points: Float[Tensor, "N D"], count: int, generator: torch.Generator, progress: Advance | None = None
) -> Float[Tensor, "{count} D"]:
    """Run k-means (Lloyd 1982) from random points; a center without points restarts at a random point."""

    def random_points() -> Tensor:
        return points[torch.randint(len(points), (count,), generator=generator)]

    codes = random_points()
    for _ in range(KMEANS_ITERS):
        assigned = nearest_code(points, codes)
        members = torch.bincount(assigned, minlength=count)[:, None]
        sums = torch.zeros_like(codes).index_add_(0, assigned, points)
        codes = torch.where(members > 0, sums / members.clamp_min(1), random_points())
        if progress:
            progress(1)
    return codes


AnyDVAEConfig = DVAEConfig | PatchDVAEConfig
