"""Single-shot detectors: SSD300 with VGG16 (Liu et al. 2016) and SSDlite320 with MobileNetV3 (Howard et al. 2019).

A backbone computes feature maps. At each position of a map, *default boxes* of several sizes and aspect ratios are
first guesses of where an object is. Two convolutional heads predict for each default box the logits of its class and
the offsets of the true box. SSD's heads are 3x3 convolutions; SSDlite's are separable, a depthwise 3x3 convolution with
ReLU6 and a 1x1 projection. Detections are decoded boxes that non-maximum suppression keeps for their class.

The networks follow PyTorch's posts on torchvision's implementations, and have torchvision's parameter names: its
published state dicts load with `load_state_dict`, if there are no attributes, and `state_dict` of a model loads there.
The layouts `ssd48` and `ssdlite48` are the same designs for pictures of 48 x 48 pixels.

Shapes: B pictures, D default boxes, K classes, N detections. Class 0 is the background.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from limner.models.boxes import decode_boxes, suppress
from limner.models.ssd_backbones import (
    VGG,
    Bottleneck,
    ConvNormActivation,
    MobileNet,
    MobileNetLayout,
    VGGLayout,
    initialize_normal,
    initialize_uniform,
)  # fmt: skip
from limner.numerics.precision import upcast
from limner.validation import InvalidSetting, Range, Validated

__all__ = [
    "LAYOUTS", "DefaultBoxes", "Detections", "Detector", "DetectorConfig", "DetectorLayout", "LayoutName",
    "PredictionHead", "Predictions",
]  # fmt: skip

LayoutName = Literal["ssd300", "ssdlite320", "ssd48", "ssdlite48"]
_MAX_COMPARISONS = 1 << 24  # pairs of boxes compared together in non-maximum suppression


class DefaultBoxes(NamedTuple):
    """Default boxes of feature maps (Liu et al. 2016, §2.2).

    Attributes:
        scales: side of the boxes of each map as a share of the picture's, and one more for the last map.
        ratios: aspect ratios of each map in addition to 1; each gives a wide and a tall box.
        strides: pixels between the centers of each map; None divides the picture evenly.
    """

    scales: tuple[float, ...]
    ratios: tuple[tuple[int, ...], ...]
    strides: tuple[int, ...] | None = None

    @property
    def counts(self) -> list[int]:
        """Boxes per position of each map."""
        return [2 + 2 * len(ratios) for ratios in self.ratios]

    def boxes(self, grids: Sequence[tuple[int, int]], size: int) -> Float[Tensor, "D 4"]:
        """Return the boxes in pixels, given rows and columns of each map: by map, row, column and shape."""
        parts = []
        for k, (grid, (scale, larger)) in enumerate(zip(grids, pairwise(self.scales), strict=True)):
            sides = [(scale, scale), (sqrt(scale * larger),) * 2]
            for ratio in self.ratios[k]:
                wide, narrow = scale * sqrt(ratio), scale / sqrt(ratio)
                sides += [(wide, narrow), (narrow, wide)]
            rows, columns = (size / self.strides[k],) * 2 if self.strides else grid
            y, x = (torch.arange(grid[0]) + 0.5) / rows, (torch.arange(grid[1]) + 0.5) / columns
            centers = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[:, :, None]
            half = torch.tensor(sides).clamp(0, 1) / 2
            parts.append(torch.cat([centers - half, centers + half], -1).flatten(0, 2))
        return torch.cat(parts) * size


class DetectorLayout(NamedTuple):
    """Architecture and post-processing of a detector.

    Attributes:
        size: side of its pictures in pixels.
        min_score: least score of a detection.
        max_iou: largest overlap of two detections of a class.
        candidates: boxes of each class that non-maximum suppression compares.
        detections: largest number of detections per picture.
    """

    size: int
    backbone: VGGLayout | MobileNetLayout
    default_boxes: DefaultBoxes
    min_score: float
    max_iou: float
    candidates: int
    detections: int


_LARGE = (
    Bottleneck(3, 16, 16, False, False, 1), Bottleneck(3, 64, 24, False, False, 2),
    Bottleneck(3, 72, 24, False, False, 1), Bottleneck(5, 72, 40, True, False, 2),
    *[Bottleneck(5, 120, 40, True, False, 1)] * 2, Bottleneck(3, 240, 80, False, True, 2),
    Bottleneck(3, 200, 80, False, True, 1), *[Bottleneck(3, 184, 80, False, True, 1)] * 2,
    Bottleneck(3, 480, 112, True, True, 1), Bottleneck(3, 672, 112, True, True, 1),
    # The reduced tail: 160 and 960 channels, halved.
    Bottleneck(5, 672, 80, True, True, 2), *[Bottleneck(5, 480, 80, True, True, 1)] * 2,
)  # fmt: skip
_SMALL = (
    Bottleneck(3, 16, 16, False, False, 1), Bottleneck(3, 64, 24, False, False, 2),
    Bottleneck(3, 96, 24, False, False, 1), Bottleneck(3, 96, 40, False, True, 2),
    Bottleneck(3, 120, 40, False, True, 1),
)  # fmt: skip
_SMALL_BOXES = DefaultBoxes((0.25, 5 / 12, 0.6), ((), ()))  # sides of the objects of synthetic scenes

LAYOUTS: dict[LayoutName, DetectorLayout] = {
    "ssd300": DetectorLayout(
        300,
        VGGLayout(
            ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3), 1024, 6,
            ((256, 512, 2), (128, 256, 2), (128, 256, 1), (128, 256, 1)),
        ),
        DefaultBoxes(
            (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05), ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
            (8, 16, 32, 64, 100, 300),
        ),
        min_score=0.01, max_iou=0.45, candidates=400, detections=200,
    ),
    "ssdlite320": DetectorLayout(
        320, MobileNetLayout(_LARGE, (512, 256, 256, 128)),
        DefaultBoxes((*(0.2 + 0.15 * k for k in range(6)), 1.0), ((2, 3),) * 6),
        min_score=0.001, max_iou=0.55, candidates=300, detections=300,
    ),
    "ssd48": DetectorLayout(
        48, VGGLayout(((16, 16), (32, 32), (64, 64), (64, 64)), 128, 2), _SMALL_BOXES,
        min_score=0.01, max_iou=0.45, candidates=100, detections=100,
    ),
    "ssdlite48": DetectorLayout(
        48, MobileNetLayout(_SMALL), _SMALL_BOXES, min_score=0.01, max_iou=0.45, candidates=100, detections=100
    ),
}  # fmt: skip


class Predictions(NamedTuple):
    """Outputs of the heads, float32, with the default boxes in pixels."""

    default_boxes: Float[Tensor, "D 4"]
    offsets: Float[Tensor, "B D 4"]
    logits: Float[Tensor, "B D K+1"]
    attributes: tuple[Float[Tensor, "B D A"], ...]


class Detections(NamedTuple):
    """Detections in a picture in descending order of their scores; `attributes` are indices of values, A = 2 or 0."""

    boxes: Float[Tensor, "N 4"]
    labels: Int64[Tensor, " N"]
    scores: Float[Tensor, " N"]
    attributes: Int64[Tensor, "N A"]


@dataclass(frozen=True, kw_only=True)
class DetectorConfig(Validated):
    """Settings of a detector.

    Args:
        layout: architecture, one of `LAYOUTS`.
        classes: K, without the background.
        attributes: numbers of values of two more properties of an object, such as its color; a head predicts them.
        width: factor on the channels of a MobileNet.
    """

    layout: LayoutName = "ssdlite320"
    classes: Annotated[int, Range(1, 10**4)] = 90
    attributes: Annotated[tuple[int, int], Range(0, 10**3)] = (0, 0)
    width: Annotated[float, Range(0.05, 8)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(self.attributes) != all(self.attributes):
            raise InvalidSetting("attributes", f"must be both 0 or both above 0, not {self.attributes}")

    def build(self) -> Detector:
        return Detector(self)


class Detector(nn.Module):
    """Pictures uint8 [B, 3, S, S] -> `Predictions`, and `detect` -> `Detections`; S is `layout.size`."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config, self.layout = config, LAYOUTS[config.layout]
        is_lite = isinstance(self.layout.backbone, MobileNetLayout)
        if isinstance(self.layout.backbone, MobileNetLayout):
            self.backbone = MobileNet(self.layout.backbone, config.width)
        else:
            self.backbone = VGG(self.layout.backbone)

        def head(columns: int) -> PredictionHead:
            counts = self.layout.default_boxes.counts
            return PredictionHead(self.backbone.channels, [columns * count for count in counts], columns, is_lite)

        self.head = nn.ModuleDict(
            {"classification_head": head(config.classes + 1), "regression_head": head(4)}
            | ({"attribute_head": head(sum(config.attributes))} if any(config.attributes) else {})
        )

    def forward(self, pixels: UInt8[Tensor, "B 3 S S"]) -> Predictions:
        maps = self.backbone(pixels.to(next(self.parameters()).dtype))
        grids = tuple((int(x.shape[-2]), int(x.shape[-1])) for x in maps)
        outputs = {name: upcast(head(maps)) for name, head in self.head.items()}
        attributes = outputs["attribute_head"].split(self.config.attributes, -1) if len(outputs) == 3 else ()
        boxes = _default_boxes(self.layout.default_boxes, grids, self.layout.size).to(pixels.device)
        return Predictions(boxes, outputs["regression_head"], outputs["classification_head"], tuple(attributes))

    @torch.no_grad()
    def detect(self, pixels: UInt8[Tensor, "B 3 S S"]) -> list[Detections]:
        """Return the detections in each picture."""
        predictions, layout = self(pixels), self.layout
        boxes = decode_boxes(predictions.offsets, predictions.default_boxes).clamp(0, layout.size)
        scores = predictions.logits.softmax(-1)[..., 1:].transpose(1, 2)  # [B, K, D]
        n = min(layout.candidates, max(1, int((scores > layout.min_score).sum(-1).max())), scores.shape[-1])
        scores, index = scores.topk(n)
        batch = max(1, _MAX_COMPARISONS // (self.config.classes * n**2))
        detections = []
        for part in zip(boxes.split(batch), scores.split(batch), index.split(batch), strict=True):
            detections += self._suppress(*part)
        # [B, D, 2], or [B, D, 0] without attributes
        values = [logits.argmax(-1, keepdim=True) for logits in predictions.attributes]
        attributes = torch.cat(values, -1) if values else index.new_empty(*boxes.shape[:2], 0)
        return [
            Detections(boxes[b, at], label, score, attributes[b, at]) for b, (at, label, score) in enumerate(detections)
        ]

    def _suppress(self, boxes: Tensor, scores: Tensor, index: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the default box, the label and the score of each detection, given boxes [B, D, 4], and for each class
        the scores [B, K, N], descending, and the default boxes [B, K, N] of its candidates."""
        candidates = boxes[torch.arange(len(boxes), device=boxes.device)[:, None, None], index]
        keep = suppress(candidates, self.layout.max_iou) & (scores > self.layout.min_score)
        detections = []
        for kept, score, at in zip(keep, scores, index, strict=True):
            score, order = score[kept].sort(descending=True, stable=True)
            order, labels = order[: self.layout.detections], kept.nonzero()[:, 0] + 1
            detections.append((at[kept][order], labels[order], score[: self.layout.detections]))
        return detections


class PredictionHead(nn.Module):
    """Feature maps -> values [B, D, `columns`], by one block for each map."""

    def __init__(self, channels: Sequence[int], outputs: Sequence[int], columns: int, is_lite: bool) -> None:
        super().__init__()
        self.columns = columns
        block = _separable if is_lite else lambda n_in, n_out: nn.Conv2d(n_in, n_out, 3, padding=1)
        self.module_list = nn.ModuleList(block(*pair) for pair in zip(channels, outputs, strict=True))
        (initialize_normal if is_lite else initialize_uniform)(self)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        values = [block(x) for block, x in zip(self.module_list, maps, strict=True)]
        return torch.cat([x.permute(0, 2, 3, 1).reshape(len(x), -1, self.columns) for x in values], 1)


def _separable(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(ConvNormActivation(n_in, n_in, 3, nn.ReLU6, groups=n_in), nn.Conv2d(n_in, n_out, 1))


@lru_cache(maxsize=16)
def _default_boxes(boxes: DefaultBoxes, grids: tuple[tuple[int, int], ...], size: int) -> Tensor:
    return boxes.boxes(grids, size)
