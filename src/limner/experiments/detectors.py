"""The breakdowns of the posts on torchvision's SSD and SSDlite: how much each step of the recipe brings.

Small detectors train on few pictures of scenes, so that augmentation can matter, and are evaluated on new ones. The
steps accumulate, as in the posts. The baseline of SSD has another detector's default boxes and learning rate, inputs
scaled to unit variance, and torch's initialization; that of SSDlite has SSD's hyperparameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from limner.data.area_resize import area_resize
from limner.data.box_augment import BoxAugment, augment
from limner.data.coco import collate
from limner.evaluation.confidence import TEST_SEEDS_FROM
from limner.evaluation.detection import Labeled, TrainedDetector, evaluate
from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, all_above, over_seeds
from limner.experiments.tiny_models import train_in_memory
from limner.models.detector import DefaultBoxes, Detector, DetectorConfig, LayoutName
from limner.objectives.detection import MultiBoxLoss
from limner.optim.schedules import Constant, Cosine, MultiStep
from limner.tasks.scene_boxes import SceneBoxes
from limner.tasks.scenes import SHAPES

SEEDS, QUICK_SEEDS = (10, 11, 12, 13), (0, 1)
SIZE = 48
#: Default boxes of SSDlite320 for two feature maps.
GENERAL_BOXES = DefaultBoxes((0.2, 0.95, 1.0), ((), ()))
_MEAN, _STD = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))  # of ImageNet


@cache
def training_pictures(count: int) -> list[Labeled]:
    """Return the training pictures and their boxes."""
    return list(SceneBoxes(SIZE).labeled(count, seed=2))


def samples(name: BoxAugment, count: int, pictures: int, seed: int) -> dict[str, Tensor]:
    """Return `count` augmented training samples of a fixed number of pictures, as `MultiBoxLoss` expects them."""
    augmented = []
    for i in range(count):
        image, truth = training_pictures(pictures)[i % pictures]
        image, boxes, kept = augment(name, image, truth.boxes, np.random.default_rng([seed, i]))
        scale = SIZE / np.tile(image.shape[1::-1], 2).astype(np.float32)
        image = area_resize(np.ascontiguousarray(image), SIZE, SIZE)
        augmented.append((image, boxes * scale, truth.labels[kept]))
    return collate(augmented)


def undo_initialization(model: Detector) -> None:
    """Initialize as torch does, train on inputs of unit variance, and use ReLU instead of ReLU6."""
    is_lite = model.config.layout == "ssdlite48"
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU6):
                setattr(module, name, nn.ReLU())

    def rescale(backbone: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        x = (inputs[0] / 255 - _MEAN) / _STD
        return 127.5 * (x + 1) if is_lite else x + 255 * x.new_tensor([0.48235, 0.45882, 0.40784])[:, None, None]

    model.backbone.register_forward_pre_hook(rescale)


def trial(
    *, seed: int, layout: LayoutName, name: BoxAugment, general_boxes: bool, initialized: bool, steps: int,
    pictures: int, test: int, **settings: Any,
) -> Result:  # fmt: skip
    """Train a detector, and return its average precision on new scenes."""
    torch.manual_seed(seed)
    model = DetectorConfig(layout=layout, classes=len(SHAPES)).build()
    if general_boxes:
        model.layout = model.layout._replace(default_boxes=GENERAL_BOXES)
    if not initialized:
        undo_initialization(model)
    data = samples(name, pictures if name == "none" else 16 * pictures, pictures, seed)
    _, losses = train_in_memory(
        model, MultiBoxLoss(), data, steps=steps, seed=seed, warmup_steps=steps // 20, **settings
    )
    new_scenes = SceneBoxes(SIZE, "held-out").labeled(test, TEST_SEEDS_FROM + 200)
    row = evaluate(TrainedDetector(model.eval(), list(SHAPES)), new_scenes, "").rows[layout]
    return {"loss": losses, **{metric: row[metric].value for metric in ("mAP@50", "mAP")}}


def steps_of_ssd(steps: int) -> dict[str, dict[str, Any]]:
    """Return the changes of each step of SSD's breakdown; the first has all settings."""
    baseline = {"layout": "ssd48", "name": "none", "general_boxes": True, "initialized": False, "steps": steps}
    return {
        "baseline": {**baseline, "lr": 2e-4, "schedule": Constant()},
        "+ hyperparameters": {"general_boxes": False, "lr": 1e-3},
        "+ augmentation": {"name": "ssd"},
        "+ initialization, input scaling": {"initialized": True},
        "+ schedule": {"steps": 2 * steps, "schedule": MultiStep()},
    }


def steps_of_ssdlite(steps: int) -> dict[str, dict[str, Any]]:
    """Return the changes of each step of SSDlite's breakdown; the first has all settings."""
    baseline = {"layout": "ssdlite48", "name": "ssd", "general_boxes": False, "initialized": False, "steps": steps}
    return {
        "baseline": {**baseline, "lr": 1e-3, "schedule": MultiStep()},
        "+ hyperparameters": {"lr": 4e-3},
        "+ SSDlite's augmentation": {"name": "ssdlite"},
        "+ 3 times the updates": {"steps": 3 * steps, "schedule": Cosine()},
        "+ 6 times the updates": {"steps": 6 * steps},
        "+ initialization, input scaling, ReLU6": {"initialized": True},
    }


def accumulate(steps: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of each step: its changes, and those of all steps before it."""
    settings = dict[str, Any]()
    return {step: (settings := {**settings, **changes}) for step, changes in steps.items()}


@experiment(
    "Each step of the recipes of SSD and SSDlite raises mAP: hyperparameters, augmentation, schedule, initialization",
    "Vryniotis 2021, PyTorch's posts on SSD and SSDlite, breakdowns of key accuracy improvements",
)
def detector(folder: Path, quick: bool) -> Finding:
    """Add the steps of each post one after the other, and compare each with the one before on the same seeds."""
    seeds, steps, settings = (
        (QUICK_SEEDS, 4, {"pictures": 16, "batch": 8, "test": 16})
        if quick
        else (SEEDS, 100, {"pictures": 256, "batch": 32, "test": 512})
    )
    recipes = {"SSD": accumulate(steps_of_ssd(steps)), "SSDlite": accumulate(steps_of_ssdlite(steps))}
    grid = {(model, step): cell for model, cells in recipes.items() for step, cell in cells.items()}
    runs = Sweep(folder, trial, grid, seeds, **settings).runs
    gains = {
        (model, step): over_seeds(runs[model, step].values("mAP") - runs[model, before].values("mAP"), "+.1%")
        for model, cells in recipes.items()
        for before, step in pairwise(cells)
    }
    ends = {model: [f"{runs[model, step].mean('mAP'):.1%}" for step in cells] for model, cells in recipes.items()}
    return Finding(
        holds=all_above(gains.values()),
        verdict="; ".join(f"{model}: mAP {values[0]} to {values[-1]}" for model, values in ends.items())
        + f" on new scenes. {sum(all_above([gain]) is True for gain in gains.values())} of {len(gains)} steps raise it "
        "significantly.",
        header=("detector", "step", "mAP@50", "mAP", "gain in mAP"),
        rows=[
            (*label, f"{cell.mean('mAP@50'):.1%}", f"{cell.mean('mAP'):.1%}", str(gains.get(label, "")))
            for label, cell in runs.items()
        ],
        curves={"Loss": {model: runs[model, [*cells][-1]].curve for model, cells in recipes.items()}},
        settings={"seeds": list(seeds), "steps of the baseline": steps, **settings},
    )
