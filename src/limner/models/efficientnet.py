"""EfficientNet-Lite0 (Tan & Le 2019, without squeeze-and-excitation and with ReLU6), for features of natural pictures.

Names of parameters are those of the published PyTorch weights, which were converted from TensorFlow. So a convolution
of stride 2 pads as TensorFlow does: more at the bottom and right.

Shapes: B batch, C channels, H x W pixels.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

FEATURES, CLASSES = 1_280, 1_000
#: Kernel, stride, expansion, output channels and repetitions of each stage.
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class SamePadConv(nn.Conv2d):
    """A convolution without bias whose output has ceil(H / stride) rows, padded as in TensorFlow."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B _ _ _"]:
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (max(0, (-(-n // stride) - 1) * stride + kernel - n) for n in x.shape[-2:])
        return super().forward(F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2)))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class MBConv(nn.Module):
    """Expand by 1 x 1, filter each channel, project by 1 x 1 without activation (Sandler et al. 2018)."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = channels * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = SamePadConv(channels, width, 1), _norm(width)
        self._depthwise_conv, self._bn1 = SamePadConv(width, width, kernel, stride, groups=width), _norm(width)
        self._project_conv, self._bn2 = SamePadConv(width, out, 1), _norm(out)
        self.expands, self.residual = expansion > 1, stride == 1 and channels == out

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B _ _ _"]:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """Classifier of ImageNet, whose input `features` are."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SamePadConv(3, 32, 3, 2), _norm(32)
        blocks, channels = [], 32
        for kernel, stride, expansion, out, repeats in STAGES:
            for i in range(repeats):
                blocks.append(MBConv(channels, out, kernel, stride if i == 0 else 1, expansion))
                channels = out
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = SamePadConv(channels, FEATURES, 1), _norm(FEATURES)
        self._fc = nn.Linear(FEATURES, CLASSES)

    def features(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B 1280"]:
        """Return pooled features of pixels in 0 .. 255."""
        x = F.relu6(self._bn0(self._conv_stem((pixels - 127) / 128)))
        return F.relu6(self._bn1(self._conv_head(self._blocks(x)))).mean((2, 3))

    def logits(self, features: Float[Tensor, "B 1280"]) -> Float[Tensor, "B 1000"]:
        """Return logits of the classes of ImageNet."""
        return self._fc(features)
