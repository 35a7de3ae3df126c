"""Backbones of the detectors: VGG for SSD, MobileNetV3 for SSDlite. Both return feature maps of decreasing resolution.

**VGG** (Liu et al. 2016, Figure 2). The first map is the last convolution before the last two stages pool (conv4_3),
normalized to unit length at each position and scaled by learned factors, since its values are larger than those of
later maps. The fully connected layers become convolutions: fc6 is *atrous*, its 3x3 kernel spread by a dilation, and
the pool before it keeps the resolution. Extra blocks shrink the map further. The third pool rounds sizes up, as Caffe
does, which gives the paper's 38 x 38 map.

**MobileNetV3** (Howard et al. 2019, §6.3). The first map, of stride 16, is the output of the *expansion* within the
block that halves the resolution to stride 32; the second is the output of the last convolution. The tail has half the
channels of a classifier (Table 6). Extra blocks are separable: 1x1, depthwise 3x3 with stride 2, 1x1, with ReLU6.

Modules have the names of torchvision's models, so that their state dicts fit.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_DEPTH = 16  # least number of channels in the extra blocks of a narrow MobileNet
INITIAL_SCALE = 20.0  # of normalized features (Liu et al. 2016, §3.1)
batch_norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.03)


class VGGLayout(NamedTuple):
    """Widths of a VGG backbone.

    Attributes:
        stages: widths of the 3x3 convolutions of each stage.
        fc, dilation: width of fc6 and fc7, and dilation of fc6.
        extra: for each extra block the widths of its 1x1 and 3x3 convolutions, and the stride of the second.
    """

    stages: tuple[tuple[int, ...], ...]
    fc: int
    dilation: int
    extra: tuple[tuple[int, int, int], ...] = ()


class VGG(nn.Module):
    """Pixels [B, 3, H, W] in 0 .. 255 -> feature maps. `channels` has the width of each."""

    def __init__(self, layout: VGGLayout) -> None:
        super().__init__()
        layers, width = list[nn.Module](), 3
        for i, stage in enumerate(layout.stages):
            if i == len(layout.stages) - 1:
                self.scale_weight = nn.Parameter(torch.full((width,), INITIAL_SCALE))
                self.features, layers = nn.Sequential(*layers), []
            if i:
                layers.append(nn.MaxPool2d(2, 2, ceil_mode=i == 3))
            for out in stage:
                layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU()]
                width = out
        layers.append(
            nn.Sequential(
                nn.MaxPool2d(3, 1, 1),
                nn.Conv2d(width, layout.fc, 3, padding=layout.dilation, dilation=layout.dilation),
                nn.ReLU(),
                nn.Conv2d(layout.fc, layout.fc, 1),
                nn.ReLU(),
            )
        )
        self.channels, width = [len(self.scale_weight), layout.fc], layout.fc
        self.extra = nn.ModuleList([nn.Sequential(*layers)])
        for narrow, out, stride in layout.extra:
            second = nn.Conv2d(narrow, out, 3, stride, padding=stride - 1)
            self.extra.append(nn.Sequential(nn.Conv2d(width, narrow, 1), nn.ReLU(), second, nn.ReLU()))
            self.channels.append(width := out)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        for block in (layers[-1], *self.extra[1:]):
            initialize_uniform(block)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        # The mean color of ImageNet; the published weights expect values on the scale 0 .. 255.
        x = pixels - pixels.new_tensor([0.48235, 0.45882, 0.40784])[:, None, None] * 255
        x = self.features(x)
        maps = [self.scale_weight[:, None, None] * F.normalize(x)]
        for block in self.extra:
            maps.append(x := block(x))
        return maps


class Bottleneck(NamedTuple):
    """A row of Table 1 of MobileNetV3: kernel, expanded and output channels, squeeze-and-excitation, Hardswish instead
    of ReLU, stride."""

    kernel: int
    expanded: int
    out: int
    squeezes: bool
    hard: bool
    stride: int


class MobileNetLayout(NamedTuple):
    """Blocks of a MobileNetV3 and widths of the extra blocks. The expansion of the last block with stride 2 is a
    feature map."""

    blocks: tuple[Bottleneck, ...]
    extra: tuple[int, ...] = ()


class ConvNormActivation(nn.Sequential):
    """A convolution that keeps the resolution (or divides it by `stride`), batch normalization, an activation."""

    def __init__(
        self, n_in: int, n_out: int, kernel: int, activation: type[nn.Module] | None, stride: int = 1, groups: int = 1
    ) -> None:
        convolution = nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(convolution, batch_norm(n_out), *([activation()] if activation else []))


class SqueezeExcitation(nn.Module):
    """Multiply channels by factors that two layers compute from their means (Hu et al. 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        narrow = _multiple_of_eight(width // 4)
        self.fc1, self.fc2 = nn.Conv2d(width, narrow, 1), nn.Conv2d(narrow, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze-and-excitation and projection (Howard et al. 2019, §5)."""

    def __init__(self, n_in: int, row: Bottleneck) -> None:
        super().__init__()
        activation, layers = nn.Hardswish if row.hard else nn.ReLU, list[nn.Module]()
        if row.expanded != n_in:
            layers.append(ConvNormActivation(n_in, row.expanded, 1, activation))
        layers.append(
            ConvNormActivation(row.expanded, row.expanded, row.kernel, activation, row.stride, groups=row.expanded)
        )
        if row.squeezes:
            layers.append(SqueezeExcitation(row.expanded))
        layers.append(ConvNormActivation(row.expanded, row.out, 1, None))
        self.block = nn.Sequential(*layers)
        self.is_residual = row.stride == 1 and n_in == row.out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.is_residual else self.block(x)


class MobileNet(nn.Module):
    """Pixels [B, 3, H, W] in 0 .. 255 -> feature maps. `channels` has the width of each; `width` multiplies the widths
    of all layers."""

    def __init__(self, layout: MobileNetLayout, width: float = 1.0) -> None:
        super().__init__()

        def scaled(row: Bottleneck) -> Bottleneck:
            expanded, out = _multiple_of_eight(row.expanded * width), _multiple_of_eight(row.out * width)
            return row._replace(expanded=expanded, out=out)

        rows = [scaled(row) for row in layout.blocks]
        inputs = [_multiple_of_eight(16 * width), *(row.out for row in rows)]
        blocks = [InvertedResidual(n_in, row) for n_in, row in zip(inputs, rows, strict=False)]
        last = 6 * inputs[-1]
        split = max(i for i, row in enumerate(rows) if row.stride == 2)
        stem = ConvNormActivation(3, inputs[0], 3, nn.Hardswish, 2)
        tail = ConvNormActivation(inputs[-1], last, 1, nn.Hardswish)
        layers = blocks[split].block
        self.features = nn.Sequential(
            nn.Sequential(stem, *blocks[:split], layers[0]), nn.Sequential(layers[1:], *blocks[split + 1 :], tail)
        )
        depths = [last, *(max(MIN_DEPTH, int(depth * width)) for depth in layout.extra)]
        self.extra = nn.ModuleList(_extra_block(*pair) for pair in pairwise(depths))
        self.channels = [rows[split].expanded, *depths]
        initialize_normal(self)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        x, maps = pixels / 127.5 - 1, []
        for block in (*self.features, *self.extra):
            maps.append(x := block(x))
        return maps


def initialize_normal(module: nn.Module) -> None:
    """Initialize convolutions as SSDlite does: normal weights of standard deviation 0.03, zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.03)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def initialize_uniform(module: nn.Module) -> None:
    """Initialize convolutions as SSD does: Xavier's uniform weights, zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def _extra_block(n_in: int, n_out: int) -> nn.Sequential:
    narrow = n_out // 2
    return nn.Sequential(
        ConvNormActivation(n_in, narrow, 1, nn.ReLU6),
        ConvNormActivation(narrow, narrow, 3, nn.ReLU6, 2, groups=narrow),
        ConvNormActivation(narrow, n_out, 1, nn.ReLU6),
    )


def _multiple_of_eight(channels: float) -> int:
    """Round to a multiple of 8 that is at least 0.9 times `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
