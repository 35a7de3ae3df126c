"""A discrete VAE of patches: a code is the nearest of V patches, and a decoder makes one picture of them.

For small, flat pictures and few processors; not in the paper
(docs/log/2026-11-23.md, "dVAE of patches for icons" compares). The codes are the centres of a
k-means clustering, found in minutes and all in use from the first step on, where the paper's encoder learns them by a
relaxation. A code says what is at its place and nothing of what is around it, which a prior learns fastest from. The
decoder pastes the patches and corrects them by their neighbours, with residual blocks at the grid's resolution. Where
patches are large, their seams show, and blocks at the picture's resolution mend them:

    tokens = nearest of `codes` to each patch;   joined = pasted codes + conv 1x1(blocks(conv 1x1(pasted codes)))
    pictures = joined + conv 3x3(refinements(conv 3x3(joined)))

Shapes: B batch, H x W pixels, h x w grid of patches of P x P pixels, V codes, D = 3 P^2 numbers of a patch, S = h * w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from limner.models.dvae import DVAE, EPSILON, Conv2d, ConvBlock, DVAEConfig, map_pixels, unmap_pixels
from limner.numerics.precision import widened
from limner.progress import Advance
from limner.validation import Checked, OutOfRange, Range

ROUNDS = 15  # of Lloyd's algorithm
_FLAT = 0.01  # largest difference within a channel of a patch that is of one color: three levels of 255
_FINE = 32  # width of the refinements: each pixel costs what a position of the grid costs elsewhere
_ROWS = 1_024  # patches compared with all codes at once: their distances stay in the processor's cache


@dataclass(frozen=True, kw_only=True)
class PatchDVAEConfig(Checked):
    """A dVAE of patches.

    Args:
        size: side of the square picture in pixels, a multiple of `patch`.
        patch: side of a patch in pixels.
        vocab: codes (V).
        width, blocks: of the decoder, at the grid's resolution.
        refinements: residual blocks at the picture's resolution; with 0, what the others make is the picture.
    """

    size: Annotated[int, Range(1, 4_096)] = 64
    patch: Annotated[int, Range(1, 64)] = 4
    vocab: Annotated[int, Range(2, 2**20)] = 8_192
    width: Annotated[int, Range(4, 4_096)] = 192
    blocks: Annotated[int, Range(1, 256)] = 4
    refinements: Annotated[int, Range(0, 256)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % self.patch:
            raise OutOfRange("size", f"must be a multiple of patch, {self.patch}, not {self.size}")

    @property
    def groups(self) -> int:
        """All blocks work at one resolution."""
        return 1

    @property
    def grid(self) -> tuple[int, int]:
        return self.size // self.patch, self.size // self.patch

    def build(self) -> PatchDVAE:
        return PatchDVAE(self)


class PatchDVAE(nn.Module):
    """Codes and decoder. Both work on any size that is a multiple of the patch.

    `codes` [V, D] are patches as `map_pixels` gives them, black until `fit` has found them. Training leaves them.
    """

    codes: Tensor

    def __init__(self, config: PatchDVAEConfig) -> None:
        super().__init__()
        self.config = config
        numbers, width = 3 * config.patch**2, config.width
        self.register_buffer("codes", torch.full((config.vocab, numbers), EPSILON))
        self.input = Conv2d(numbers, width, 1, gain=4.0)  # of numbers that differ by a quarter
        self.blocks = nn.Sequential(*(ConvBlock(width, width, (1, 3, 3, 3), 0.5, 2**0.5) for _ in range(config.blocks)))
        self.output = Conv2d(width, numbers, 1, gain=0.01)
        fine = (ConvBlock(_FINE, _FINE, (1, 3, 3, 3), 0.5, 2**0.5) for _ in range(config.refinements))
        layers = [Conv2d(3, _FINE, 3), *fine, nn.ReLU(), Conv2d(_FINE, 3, 3, gain=0.01)] if config.refinements else []
        self.refine = nn.Sequential(*layers)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @torch.no_grad()
    def tokens(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Int64[Tensor, "B S"]:
        """uint8 [B, 3, H, W] -> int64 [B, S], the nearest code of each patch."""
        with torch.autocast(pixels.device.type, enabled=False):  # codes are nearer to each other than bf16 can tell
            codes = widened(self.codes)
            return nearest_code(self._patches(pixels).flatten(0, 1).to(codes.dtype), codes).view(len(pixels), -1)

    def decode(self, tokens: Int64[Tensor, "B h w"]) -> Float[Tensor, "B 3 H W"]:
        """Codes -> float32 (or float64) [B, 3, H, W], pixels as `map_pixels` gives them."""
        pasted = F.embedding(tokens, self.codes).movedim(-1, 1)
        x = self.blocks(self.input((pasted - 0.5).to(self.input.w.dtype)))
        joined = F.pixel_shuffle(widened(pasted) + widened(self.output(F.relu(x))), self.config.patch)
        if not self.config.refinements:
            return joined
        return joined + widened(self.refine((joined - 0.5).to(self.input.w.dtype)))

    @torch.no_grad()
    def pictures(self, tokens: Int64[Tensor, "B S"], grid: tuple[int, int] | None = None) -> UInt8[Tensor, "B 3 H W"]:
        """int64 [B, S] -> uint8 [B, 3, H, W]."""
        return unmap_pixels(self.decode(tokens.unflatten(1, grid or self.config.grid)))

    @torch.no_grad()
    def fit(
        self,
        pixels: UInt8[Tensor, "B 3 H W"],
        generator: torch.Generator,
        samples: int = 200_000,
        progress: Advance | None = None,
    ) -> None:
        """Make `codes` the centres of about `samples` patches of uint8 [B, 3, H, W], all on the CPU.

        Patches of one color, most of a flat picture, have an eighth of the codes for themselves, which are of one
        color, too: otherwise the nearest code of a flat area has traces of an edge, and the area dots. A color is drawn
        with a chance that grows with the root of its frequency, another patch with one that grows with its contrast.
        `progress` is advanced by one after each of `ROUNDS` rounds.
        """
        found, colors, each = [], [], -(-samples // len(pixels))
        for picture in pixels:
            patches = self._patches(picture[None])[0]
            channels = patches.unflatten(1, (3, -1))
            flat = (channels.amax(2) - channels.amin(2)).amax(1) <= _FLAT
            colors.append(channels[flat].mean(2))
            others = patches[~flat]
            if len(others):
                contrast = channels[~flat].std(2).mean(1) + 0.01
                found.append(others[torch.multinomial(contrast, min(each, len(others)), generator=generator)])
        vocab = self.config.vocab
        plain = self._plain(torch.cat(colors), max(1, vocab // 8) if found else vocab, samples // 8, generator)
        others = torch.cat(found) if found else plain
        rest = [centres(others, vocab - len(plain), generator, progress)] if len(plain) < vocab else []
        self.codes.copy_(torch.cat([plain, *rest]))

    def _plain(
        self, colors: Float[Tensor, "N 3"], most: int, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "F D"]:
        """Codes of one color each, at most so many: colors that pictures have, so that no other code is nearer."""
        distinct, counts = torch.unique(unmap_pixels(colors), dim=0, return_counts=True)
        if len(distinct) <= most:  # also where there is none
            chosen = distinct
        else:
            drawn = torch.multinomial(counts.sqrt(), samples, replacement=True, generator=generator)
            chosen = unmap_pixels(centres(map_pixels(distinct[drawn]), most, generator))
        return map_pixels(chosen).repeat_interleave(self.config.patch**2, 1)

    def _patches(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B S D"]:
        return F.pixel_unshuffle(map_pixels(pixels), self.config.patch).flatten(2).mT


def nearest_code(points: Float[Tensor, "N D"], codes: Float[Tensor, "V D"]) -> Int64[Tensor, " N"]:
    """The row of `codes` that is nearest to each point."""
    half = codes.square().sum(1) / 2  # half the squared distance is |p|^2 / 2 - p.c + |c|^2 / 2
    return torch.cat([torch.addmm(half, part, codes.T, alpha=-1).min(1).indices for part in points.split(_ROWS)])


def centres(
    points: Float[Tensor, "N D"], count: int, generator: torch.Generator, progress: Advance | None = None
) -> Float[Tensor, "{count} D"]:
    """k-means (Lloyd 1982) from random points; a centre that is nearest to no point begins anew at a random one."""

    def some() -> Tensor:
        return points[torch.randint(len(points), (count,), generator=generator)]

    codes = some()
    for _ in range(ROUNDS):
        own = nearest_code(points, codes)
        members = torch.bincount(own, minlength=count)[:, None]
        sums = torch.zeros_like(codes).index_add_(0, own, points)
        codes = torch.where(members > 0, sums / members.clamp_min(1), some())
        if progress:
            progress(1)
    return codes


#: Both kinds have `tokens`, `pictures` and a `config` with size, grid and vocab: all that a prior and a drawing need.
AnyDVAE = DVAE | PatchDVAE
AnyDVAEConfig = DVAEConfig | PatchDVAEConfig
