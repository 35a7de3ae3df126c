"""Training of detectors on scenes, composites of icons or a folder in COCO's format, by the one training loop.

The presets follow PyTorch's posts on SSD and SSDlite: multi-step schedule and all augmentations for SSD, cosine
schedule and few augmentations for SSDlite, for as many updates as torchvision's recipes. AdamW replaces SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch

from limner.data.box_augment import BoxAugment
from limner.data.coco import CocoDataset, read_coco
from limner.data.stream import Dataset, Stream
from limner.errors import UserError
from limner.evaluation.detection import TrainedDetector, evaluate, load_detector
from limner.evaluation.icon_composites import IconComposites, is_icons
from limner.models.detector import LAYOUTS, DetectorConfig, LayoutName
from limner.numerics.seeding import fold_in
from limner.objectives.detection import MultiBoxLoss
from limner.optim.optimizers import AdamWConfig
from limner.optim.schedules import Cosine, MultiStep
from limner.progress import progress
from limner.tasks.scene_boxes import ATTRIBUTES, SceneBoxes
from limner.tasks.scenes import UNITS
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.train_state import Evaluate, TrainState
from limner.validation import Range, Validated

__all__ = ["PRESETS", "SCENES", "DetectorRecipe", "train_detector"]

SCENES = "scenes"  # name of the synthetic scenes in place of a folder
VALIDATION_SCENES, VALIDATION_SEED = 256, 1


@dataclass(frozen=True, kw_only=True)
class DetectorRecipe(Validated):
    """Settings of a training run.

    Args:
        layout: architecture and size of the pictures.
        augment: augmentation of the pictures of a folder: "ssd" (photometric distortion, zoom out and in, flips),
            "ssdlite" (zoom in, flips) or "none".
        width: factor on the channels of a MobileNet.
    """

    layout: LayoutName
    augment: BoxAugment
    width: Annotated[float, Range(0.05, 8)] = 1.0
    objective: MultiBoxLoss = field(default_factory=MultiBoxLoss)
    training: TrainConfig


def _recipe(layout: LayoutName, augment: BoxAugment, **training: Any) -> DetectorRecipe:
    return DetectorRecipe(layout=layout, augment=augment, training=TrainConfig(**training))


PRESETS: dict[LayoutName, DetectorRecipe] = {
    # 120 epochs of COCO's 117,266 pictures with boxes
    "ssd300": _recipe(
        "ssd300", "ssd", steps=440_000, batch_size=32, warmup_steps=1_000, schedule=MultiStep(),
        optimizer=AdamWConfig(lr=2e-4),
    ),
    # 660 epochs
    "ssdlite320": _recipe(
        "ssdlite320", "ssdlite", steps=403_000, batch_size=192, warmup_steps=1_000, schedule=Cosine(),
        optimizer=AdamWConfig(lr=2e-3),
    ),
    "ssd48": _recipe(
        "ssd48", "none", steps=1_500, batch_size=64, warmup_steps=100, schedule=MultiStep(),
        optimizer=AdamWConfig(lr=1e-3),
    ),
    "ssdlite48": _recipe(
        "ssdlite48", "none", steps=1_000, batch_size=64, warmup_steps=50, schedule=Cosine(),
        optimizer=AdamWConfig(lr=4e-3),
    ),
}  # fmt: skip


def train_detector(recipe: DetectorRecipe, data: str, out: str | Path) -> TrainedDetector:
    """Train a detector in the folder `out` on "scenes", icons or a folder in COCO's format, resuming an earlier run.

    Raises `UserError` for bad data, and all that `training.loop.train` raises.
    """
    size, training = LAYOUTS[recipe.layout].size, recipe.training
    if training.batch_size < 2 * training.accumulate:
        raise UserError("batch normalization needs at least 2 pictures at a time: raise training.batch_size")
    dataset, classes, evaluation = _open(recipe, data, size)
    attributes = ATTRIBUTES if data == SCENES else (0, 0)
    config = DetectorConfig(layout=recipe.layout, classes=len(classes), attributes=attributes, width=recipe.width)
    torch.manual_seed(fold_in(training.seed))
    model = config.build()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {"model": config, "objective": recipe.objective, "augment": recipe.augment, "classes": classes}
    stream = Stream(dataset, training.batch_size, training.seed, prefetch=2)
    try:
        with progress("training the detector", training.steps) as bar:
            run = TrainState(model, recipe.objective, training, device)
            train(run, stream, out, evaluate=evaluation, record=record, bar=bar)
    finally:
        stream.close()
    return load_detector(out)


def _open(recipe: DetectorRecipe, data: str, size: int) -> tuple[Dataset, list[str], Evaluate | None]:
    """Return the training data, the names of its classes, and the evaluation on new scenes or composites."""
    if data == SCENES and size % UNITS:
        raise UserError(f"scenes cannot have {size} pixels per side: choose --layout ssdlite48, ssd48 or ssd300")
    if data != SCENES and not is_icons(data):
        pictures, classes = read_coco(data)
        return CocoDataset(pictures, size, recipe.augment), classes, None
    dataset = SceneBoxes(size) if data == SCENES else IconComposites.open(data, size)
    classes = dataset.classes

    def evaluation(model: Any, step: int) -> Mapping[str, float]:
        result = evaluate(TrainedDetector(model, classes), dataset.labeled(VALIDATION_SCENES, VALIDATION_SEED), data)
        return {name: result.rows[recipe.layout][name].value for name in ("mAP@50", "mAP")}

    return dataset, classes, evaluation
