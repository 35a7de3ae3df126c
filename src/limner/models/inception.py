"""Inception v3 as published for FID and the Inception Score: TensorFlow's network of 2015-12-05.

Names of parameters are those of its conversion to PyTorch, `pt_inception-2015-12-05-6726825d.pth`. It differs from
Szegedy et al. (2016): 1,008 classes, average pools that leave out the padding, and a max pool in the last block.

Shapes: B batch, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

FEATURES, CLASSES = 2_048, 1_008
Size = int | tuple[int, int]
Pool = Callable[[Tensor], Tensor]


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, channels: int, out: int, kernel: Size, stride: int = 1, padding: Size | str = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=1e-3)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B _ _ _"]:
        return F.relu(self.bn(self.conv(x)))


_average = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
_maximum = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
_shrink = partial(F.max_pool2d, kernel_size=3, stride=2)


class Branches(nn.Module):
    """Branches of convolutions over one input, concatenated, with a branch that pools last.

    Args:
        channels: C.
        branches: layers of each branch by name: (output channels, kernel, stride), padded to keep the size at
            stride 1.
        pool: of the last branch.
        pool_channels: output channels of a 1 x 1 convolution after the pool; 0 for none.
    """

    def __init__(
        self, channels: int, branches: Mapping[str, Sequence[tuple[int, Size, int]]], pool: Pool, pool_channels: int = 0
    ) -> None:
        super().__init__()
        self.pool, self.paths = pool, list[list[str]]()
        for name, layers in branches.items():
            width, path = channels, []
            for i, (out, kernel, stride) in enumerate(layers, 1):
                key = f"branch{name}_{i}" if len(layers) > 1 else f"branch{name}"
                path.append(key)
                self.add_module(key, ConvNorm(width, out, kernel, stride, "same" if stride == 1 else 0))
                width = out
            self.paths.append(path)
        self.branch_pool = ConvNorm(channels, pool_channels, 1) if pool_channels else nn.Identity()

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B _ _ _"]:
        outputs = []
        for path in self.paths:
            y = x
            for key in path:
                y = getattr(self, key)(y)
            outputs.append(y)
        return torch.cat([*outputs, self.branch_pool(self.pool(x))], 1)


class Fork(nn.Module):
    """The last block's form: two branches end in a 1 x 3 and a 3 x 1 convolution side by side."""

    def __init__(self, channels: int, pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.branch1x1 = ConvNorm(channels, 320, 1)
        self.branch3x3_1 = ConvNorm(channels, 384, 1)
        self.branch3x3dbl_1 = ConvNorm(channels, 448, 1)
        self.branch3x3dbl_2 = ConvNorm(448, 384, 3, 1, 1)
        for name in ("3x3_2", "3x3dbl_3"):
            self.add_module(f"branch{name}a", ConvNorm(384, 384, (1, 3), 1, (0, 1)))
            self.add_module(f"branch{name}b", ConvNorm(384, 384, (3, 1), 1, (1, 0)))
        self.branch_pool = ConvNorm(channels, 192, 1)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B 2048 H W"]:
        single, double = self.branch3x3_1(x), self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        ends = [getattr(self, f"branch3x3_2{end}")(single) for end in "ab"]
        ends += [getattr(self, f"branch3x3dbl_3{end}")(double) for end in "ab"]
        return torch.cat([self.branch1x1(x), *ends, self.branch_pool(self.pool(x))], 1)


def _mixed_5(channels: int, pooled: int) -> Branches:
    branches = {"1x1": [(64, 1, 1)], "5x5": [(48, 1, 1), (64, 5, 1)], "3x3dbl": [(64, 1, 1), (96, 3, 1), (96, 3, 1)]}
    return Branches(channels, branches, _average, pooled)


def _mixed_6(width: int) -> Branches:
    row, column = (1, 7), (7, 1)
    branches = {
        "1x1": [(192, 1, 1)],
        "7x7": [(width, 1, 1), (width, row, 1), (192, column, 1)],
        "7x7dbl": [(width, 1, 1), (width, column, 1), (width, row, 1), (width, column, 1), (192, row, 1)],
    }
    return Branches(768, branches, _average, 192)


class Inception(nn.Module):
    """Classifier whose input `features` are, for pictures of 299 x 299 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvNorm(3, 32, 3, 2)
        self.Conv2d_2a_3x3 = ConvNorm(32, 32, 3)
        self.Conv2d_2b_3x3 = ConvNorm(32, 64, 3, 1, 1)
        self.Conv2d_3b_1x1 = ConvNorm(64, 80, 1)
        self.Conv2d_4a_3x3 = ConvNorm(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _mixed_5(192, 32), _mixed_5(256, 64), _mixed_5(288, 64)
        self.Mixed_6a = Branches(288, {"3x3": [(384, 3, 2)], "3x3dbl": [(64, 1, 1), (96, 3, 1), (96, 3, 2)]}, _shrink)
        self.Mixed_6b, self.Mixed_6c = _mixed_6(128), _mixed_6(160)
        self.Mixed_6d, self.Mixed_6e = _mixed_6(160), _mixed_6(192)
        shrinking = {
            "3x3": [(192, 1, 1), (320, 3, 2)],
            "7x7x3": [(192, 1, 1), (192, (1, 7), 1), (192, (7, 1), 1), (192, 3, 2)],
        }
        self.Mixed_7a = Branches(768, shrinking, _shrink)
        self.Mixed_7b, self.Mixed_7c = Fork(1_280, _average), Fork(2_048, _maximum)
        self.fc = nn.Linear(FEATURES, CLASSES)

    def features(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B 2048"]:
        """Return pooled features of pixels in 0 .. 255."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(pixels / 127.5 - 1)))
        x = _shrink(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(_shrink(x))))
        for name in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c"):
            x = getattr(self, f"Mixed_{name}")(x)
        return x.mean((2, 3))

    def logits(self, features: Float[Tensor, "B 2048"]) -> Float[Tensor, "B 1008"]:
        """Return logits without the bias, as the authors of the Inception Score compute them."""
        return features @ self.fc.weight.T
