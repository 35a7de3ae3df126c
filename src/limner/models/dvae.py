"""The discrete VAE: a picture becomes a grid of tokens and back (Ramesh et al. 2021, §2.1, App. A).

The encoder and decoder are convolutional ResNets with bottleneck blocks. The encoder max-pools
between its groups and ends in a 1x1 convolution to one logit for each of the `vocab` codes at every
grid position; the decoder begins with a 1x1 convolution, which for a one-hot input *is* the codebook,
and upsamples by nearest-neighbor interpolation. The paper's model is the default: 4 groups, so 8x downsampling,
256 x 256 -> 32 x 32 tokens, width 256, 8192 codes. Parameters carry the names of the released code. The bundled
`scenes` has such a dVAE, `icons` one of patches (`patch_dvae.py`), which takes minutes to train.

    encoder  conv 7x7 -> [2 blocks, pool] x (groups - 1) -> 2 blocks -> relu -> conv 1x1 -> logits
    decoder  conv 1x1 -> [2 blocks, x2]   x (groups - 1) -> 2 blocks -> relu -> conv 1x1 -> (mu, ln b)

Shapes: B batch, H x W pixels, h x w grid (H / stride), V codes, S = h * w.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from limner.attention.patterns import Grid
from limner.models.image_tokenizer import ImageTokenizer
from limner.models.patch_encoder import PatchEncoder
from limner.numerics.precision import upcast
from limner.validation import InvalidSetting, Range, Validated

__all__ = ["DVAE", "Conv2d", "ConvBlock", "DVAEConfig", "Decoder", "Encoder", "map_pixels", "unmap_pixels"]

EPSILON = 0.1  # of Equation 3: keeps the pixels away from the poles of the logit


def map_pixels(pixels: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """phi of Equation 3: uint8 [...] in [0, 255] -> float32 in (eps, 1 - eps)."""
    return pixels.float() * ((1 - 2 * EPSILON) / 255) + EPSILON


def unmap_pixels(values: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """The inverse of `map_pixels`, rounded and clamped to uint8."""
    return ((values - EPSILON) * (255 / (1 - 2 * EPSILON))).round().clamp(0, 255).to(torch.uint8)


class Conv2d(nn.Module):
    """A same-size convolution whose parameters are named `w` and `b`, as in the released code."""

    def __init__(self, n_in: int, n_out: int, kernel: int, gain: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(n_out, n_in, kernel, kernel))
        self.b = nn.Parameter(torch.zeros(n_out))
        nn.init.normal_(self.w, std=gain / (n_in * kernel**2) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.w, self.b, padding=self.w.shape[-1] // 2)


class ConvBlock(nn.Module):
    """A bottleneck resblock: `id_path(x) + gain * res_path(x)`, hidden width a quarter of the output.

    Args:
        kernels: of the four convolutions, as a rule (3, 3, 3, 1) in the encoder and (1, 3, 3, 3) in the decoder.
        gain: the small constant that keeps deep stacks stable at initialization (§2.1).
        init_gain: of the weights; sqrt(2) keeps the variance through a ReLU.
    """

    def __init__(self, n_in: int, n_out: int, kernels: tuple[int, ...], gain: float, init_gain: float) -> None:
        super().__init__()
        hidden = n_out // 4
        widths = (n_in, hidden, hidden, hidden, n_out)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, kernel in enumerate(kernels, 1):
            layers[f"relu_{i}"] = nn.ReLU()
            layers[f"conv_{i}"] = Conv2d(widths[i - 1], widths[i], kernel, init_gain)
        self.id_path = Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()
        self.res_path = nn.Sequential(layers)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.id_path(x) + self.gain * self.res_path(x)


def _group(config: DVAEConfig, n_in: int, n_out: int, kernels: tuple[int, ...], **after: nn.Module) -> nn.Sequential:
    """`config.blocks` resblocks, of which the first changes the width, followed by `after`."""
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for b in range(1, config.blocks + 1):
        blocks[f"block_{b}"] = ConvBlock(
            n_in if b == 1 else n_out, n_out, kernels, config.branch_gain, config.init_gain
        )
    return nn.Sequential(blocks | after)


class Encoder(nn.Module):
    """Mapped pixels [B, 3, H, W] -> logits [B, V, h, w] of q(z | x)."""

    def __init__(self, config: DVAEConfig) -> None:
        super().__init__()
        widths = [config.width * 2**g for g in range(config.groups)]
        n_context = config.context_groups or config.groups
        parts: OrderedDict[str, nn.Module] = OrderedDict(input=Conv2d(3, config.width, 7))
        logits = Conv2d(widths[-1], config.vocab, 1)
        for g, (n_in, n_out) in enumerate(pairwise([config.width, *widths]), 1):
            pool = {"pool": nn.MaxPool2d(2)} if g < config.groups else {}
            parts[f"group_{g}"] = _group(config, n_in, n_out, (3, 3, 3, 1) if g <= n_context else (1, 1, 1, 1), **pool)
        parts["output"] = nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=logits))
        self.blocks = nn.Sequential(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Decoder(nn.Module):
    """(Relaxed) one-hot codes [B, V, h, w] -> (mu, ln b) [B, 6, H, W] of the logit-Laplace."""

    def __init__(self, config: DVAEConfig) -> None:
        super().__init__()
        widths = [config.width * 2**g for g in reversed(range(config.groups))]
        # A one-hot has unit energy, not one per channel: its fan-in is 1, not V.
        codebook = Conv2d(config.vocab, config.code_width, 1, gain=config.code_gain)
        parts: OrderedDict[str, nn.Module] = OrderedDict(input=codebook)
        pixels = Conv2d(widths[-1], 6, 1)
        for g, (n_in, n_out) in enumerate(pairwise([config.code_width, *widths]), 1):
            up = {"upsample": nn.Upsample(scale_factor=2, mode="nearest")} if g < config.groups else {}
            parts[f"group_{g}"] = _group(config, n_in, n_out, (1, 3, 3, 3), **up)
        parts["output"] = nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=pixels))
        self.blocks = nn.Sequential(parts)

    def forward(self, z: Tensor) -> Tensor:
        return self.blocks(z)


@dataclass(frozen=True, kw_only=True)
class DVAEConfig(Validated):
    """Defaults are the paper's model: 53.8 M parameters in the encoder, 43.8 M in the decoder.

    Args:
        size: side of the square picture in pixels, a multiple of `stride`.
        width: of the outermost group (n_hid); group g is `2^(g-1)` times as wide.
        groups: downsampling is `2^(groups - 1)`.
        blocks: resblocks per group.
        vocab: codes in the codebook (V).
        code_width: width of the decoder's first layer (n_init), that is of a code's embedding.
        gain: of the residual branches; None is the released code's `1 / (groups * blocks)^2`.
        init_gain, code_gain: of the initial weights in the branches and of the codebook.
        context_groups: encoder groups with 3x3 kernels, which see adjacent positions; later ones have
            1x1 kernels. None is all of them, as in the paper. With 0 every patch of `stride` x `stride` pixels is
            encoded alone (`patch_encoder.py`).
    """

    size: Annotated[int, Range(1, 4_096)] = 256
    width: Annotated[int, Range(4, 4_096)] = 256
    groups: Annotated[int, Range(1, 12)] = 4
    blocks: Annotated[int, Range(1, 256)] = 2
    vocab: Annotated[int, Range(2, 2**20)] = 8192
    code_width: Annotated[int, Range(1, 2**16)] = 128
    gain: Annotated[float | None, Range(gt=0)] = None
    init_gain: Annotated[float, Range(gt=0)] = 1.0
    code_gain: Annotated[float, Range(gt=0)] = 1.0
    context_groups: Annotated[int | None, Range(0, 12)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % self.stride:
            raise InvalidSetting("size", f"must be a multiple of the stride, {self.stride}, not {self.size}")
        if self.width * self.stride > 2**15:
            raise InvalidSetting(
                "width", f"must be at most {2**15 // self.stride:,} with {self.groups} groups, not {self.width:,}"
            )
        if (self.context_groups or 0) > self.groups:
            raise InvalidSetting("context_groups", f"must be at most groups, {self.groups}, not {self.context_groups}")

    @property
    def branch_gain(self) -> float:
        """Factor of the residual branches (§2.1)."""
        return self.gain or 1 / self.depth**2

    @property
    def depth(self) -> int:
        """Number of resblocks of the encoder, and of the decoder."""
        return self.groups * self.blocks

    @property
    def stride(self) -> int:
        return 2 ** (self.groups - 1)

    @property
    def grid(self) -> tuple[int, int]:
        return self.size // self.stride, self.size // self.stride

    def build(self) -> DVAE:
        return DVAE(self)


class DVAE(ImageTokenizer):
    """Encoder and decoder. Both work on any size that is a multiple of the stride."""

    def __init__(self, config: DVAEConfig) -> None:
        super().__init__()
        self.config = config
        encoder = Encoder(config)
        self.encoder = PatchEncoder(encoder.blocks, config.stride) if config.context_groups == 0 else encoder
        self.decoder = Decoder(config)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def encode(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B V h w"]:
        """uint8 [B, 3, H, W] -> logits float32 [B, V, h, w]; float64 of weights in float64."""
        x = map_pixels(pixels).to(next(self.parameters()).dtype, memory_format=torch.channels_last)
        return upcast(self.encoder(x))

    def decode(self, z: Float[Tensor, "B V h w"]) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B 3 H W"]]:
        """Codes [B, V, h, w] -> mu, ln b, each float32 (or float64) [B, 3, H, W]."""
        mu, log_b = upcast(self.decoder(z)).chunk(2, dim=1)
        return mu, log_b

    @torch.no_grad()
    def tokenize(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Int64[Tensor, "B S"]:
        """uint8 [B, 3, H, W] -> int64 [B, S], the argmax code of each position (§2.2)."""
        return self.encode(pixels).argmax(1).flatten(1)

    @torch.no_grad()
    def decode_tokens(self, tokens: Int64[Tensor, "B S"], grid: Grid | None = None) -> UInt8[Tensor, "B 3 H W"]:
        """int64 [B, S] -> uint8 [B, 3, H, W]: phi^-1(sigmoid(mu)), without regard to b (App. A.3)."""
        tokens = tokens.unflatten(1, grid or self.config.grid)
        z = F.one_hot(tokens, self.config.vocab).movedim(-1, 1)
        z = z.to(next(self.parameters()).dtype).contiguous(memory_format=torch.channels_last)
        return unmap_pixels(torch.sigmoid(self.decode(z)[0]))
