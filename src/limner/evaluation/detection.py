"""Evaluation of detectors: average precision, time, and agreement with the scene parser on drawings.

On scenes the parser (`tasks/scene_reader.py`) is exact, so it measures how far a detector can be trusted as a checker
of drawings of other pictures, for which no parser exists. *Same scene*: the share of the drawings that the parser can
read in which the detector finds the same objects and background. *Same verdict*: the share of all drawings on which
both say the same about the caption.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from limner.config import from_dict
from limner.data.area_resize import area_resize
from limner.data.coco import CocoDataset, read_coco
from limner.data.sample import Rejected
from limner.errors import UserError
from limner.evaluation.composition import sample_captions
from limner.evaluation.confidence import Estimate, proportion
from limner.evaluation.generate_batches import attribute_key, generate_batches
from limner.evaluation.icon_composites import IconComposites, is_icons
from limner.evaluation.result import EvalResult
from limner.json_files import read_mapping
from limner.metrics.detection import BoxSet, mean_average_precision
from limner.models.detector import Detections, Detector, DetectorConfig
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.tasks import captions, scene_reader
from limner.tasks.scene_boxes import ATTRIBUTES, SceneBoxes, scene_from_detections
from limner.tasks.scenes import SHAPES, Split
from limner.tasks.verify import scenes_match
from limner.training.checkpoint import load_weights

__all__ = [
    "TrainedDetector", "agreement", "coco_pictures", "detect", "evaluate", "labeled_pictures", "load_detector",
    "require_classes",
]  # fmt: skip

_BATCH = 32
MAX_DISTANCE = 1.0  # in units, between an object's positions found by parser and detector


class TrainedDetector(NamedTuple):
    """A detector in evaluation mode with the names of its classes."""

    model: Detector
    classes: list[str]

    @property
    def reads_scenes(self) -> bool:
        """True if it was trained on synthetic scenes."""
        return self.model.config.attributes == ATTRIBUTES and self.classes == list(SHAPES)


def load_detector(run: str | Path) -> TrainedDetector:
    """Load the newest checkpoint of a run of `limner detector`. Raises `UserError`."""
    path = Path(run) / "config.json"
    if not path.is_file():
        raise UserError(f"{run} is not a run of `limner detector`: it lacks config.json")
    record = read_mapping(path)
    config, classes = record.get("model"), record.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"{run} is not a run of `limner detector`: its config.json lists no classes")
    model = from_dict(DetectorConfig, config, "model").build()
    load_weights(model, run)
    return TrainedDetector(model.eval(), classes)


Labeled = tuple[np.ndarray, BoxSet]  # a picture uint8 [S, S, 3] and its true boxes


def require_classes(detector: TrainedDetector, classes: Sequence[str], data: str | Path) -> None:
    """Raise `UserError` if the classes of data are not the detector's."""
    if detector.classes != list(classes):
        raise UserError(f"{data} has other categories than the detector: evaluate on data with the same categories")


def coco_pictures(detector: TrainedDetector, folder: str | Path, count: int) -> Iterator[Labeled]:
    """Yield at most `count` readable pictures of a folder in COCO's format, resized. Raises `UserError` if its classes
    are not the detector's."""
    pictures, names = read_coco(folder)
    require_classes(detector, names, folder)
    size = detector.model.layout.size
    dataset = CocoDataset(pictures[:count], size, "none")
    for i, picture in enumerate(dataset.pictures):
        try:
            image = dataset.read(i)
        except Rejected:
            continue
        scale = size / np.tile(picture.size, 2)
        yield area_resize(image, size, size), BoxSet(picture.boxes * scale, picture.labels, None, picture.groups)


def labeled_pictures(
    detector: TrainedDetector, data: str | None, count: int, seed: int, split: Split
) -> tuple[Iterator[Labeled], str]:
    """Return at most `count` pictures of a folder in COCO's format, composites of icons of a split, or new scenes, and
    their name. Raises `UserError`."""
    size = detector.model.layout.size
    if data is not None and is_icons(data):
        composites = IconComposites.open(data, size, "combination" if split == "held-out" else split)
        require_classes(detector, composites.classes, data)
        return composites.labeled(count, seed), f"composites of {split} icons"
    if data is not None:
        return coco_pictures(detector, data, count), data
    if not detector.reads_scenes:
        raise UserError("the detector was not trained on scenes: name a folder with pictures and boxes by --data")
    return SceneBoxes(size, split).labeled(count, seed), f"{split} scenes"


def evaluate(
    detector: TrainedDetector, pictures: Iterator[Labeled], title: str, progress: Advance | None = None
) -> EvalResult:
    """Measure average precision and the time per picture, in batches of 32. Raises `UserError` without pictures."""
    detected, truth, seconds = list[BoxSet](), list[BoxSet](), 0.0
    batch = list[Labeled]()
    for item in (*pictures, None):
        batch += [item] if item else []
        if len(batch) == _BATCH or (batch and item is None):
            start = time.perf_counter()
            found = detect(detector.model, [image for image, _ in batch])
            seconds += time.perf_counter() - start
            detected += [BoxSet(*(part.numpy() for part in found_in_one[:3])) for found_in_one in found]
            truth += [boxes for _, boxes in batch]
            if progress:
                progress(len(batch))
            batch = []
    if not truth:
        raise UserError("none of the pictures can be read: check the data")
    metrics = mean_average_precision(detected, truth)
    parameters = sum(weight.numel() for weight in detector.model.parameters())
    row = {name: Estimate(value=value, spec=".1%") for name, value in metrics.items()} | {
        "time": Estimate(value=1_000 * seconds / len(truth), unit="ms"),
        "parameters": Estimate(value=parameters / 1e6, unit="M", spec=".3g"),
    }
    layout = detector.model.config.layout
    return EvalResult(title=f"{title}, {len(truth):,} pictures", rows={layout: row}, settings={"layout": layout})


def agreement(
    detector: TrainedDetector,
    pipe: TextToImage,
    count: int,
    seed: int,
    split: Split = "held-out",
    progress: Advance | None = None,
) -> EvalResult:
    """Draw `count` captions of scenes and compare the detector with the scene parser on the drawings.

    Raises `UserError` if the detector was not trained on scenes of the model's size.
    """
    size = detector.model.layout.size
    if not detector.reads_scenes or pipe.dvae.config.size != size:
        raise UserError(f"the detector does not read drawings of {pipe.name}: train it with `limner detector scenes`")
    captioned = sample_captions(split, n=count, seed=seed)
    cases, seconds = list[dict[str, Any]](), {"detector": 0.0, "scene parser": 0.0}
    for part, batch in generate_batches(pipe, [caption for caption, _ in captioned], 1, seed, progress=progress):
        pictures = [*torch.cat([*batch.pictures]).permute(0, 2, 3, 1).contiguous().numpy()]
        start = time.perf_counter()
        found = [scene_from_detections(*pair) for pair in zip(detect(detector.model, pictures), pictures, strict=True)]
        middle = time.perf_counter()
        read = [scene_reader.read(picture).scene for picture in pictures]
        seconds["detector"] += middle - start
        seconds["scene parser"] += time.perf_counter() - middle
        for i, scene, parsed in zip(part, found, read, strict=True):
            claims = captions.parse(captioned[i][0])
            assert claims is not None
            right = claims.matches(scene), parsed is not None and claims.matches(parsed)
            same = None if parsed is None else scenes_match(parsed, scene, MAX_DISTANCE)
            case = {"caption": captioned[i][0], "combination": attribute_key(captioned[i][1])}
            cases.append(case | {"same_scene": same, "detector": right[0], "parser": right[1]})
    readable = [case for case in cases if case["same_scene"] is not None]
    row = {"same verdict": _share([case["detector"] == case["parser"] for case in cases], cases)}
    if readable:
        row = {"same scene": _share([case["same_scene"] for case in readable], readable), **row}
    times = {name: Estimate(value=1_000 * value / len(cases), unit="ms") for name, value in seconds.items()}
    rows = {
        detector.model.config.layout: {**row, "time": times["detector"]},
        "scene parser": {"time": times["scene parser"]},
    }
    title = f"drawings of {pipe.name}, {len(cases):,} {split} captions, {len(readable):,} readable by the parser"
    return EvalResult(title=title, rows=rows, cases=cases, settings={"model": pipe.name, "seed": seed})


def _share(values: Sequence[bool], cases: Sequence[dict[str, Any]]) -> Estimate:
    return proportion(np.array(values), [case["combination"] for case in cases])


def detect(model: Detector, pictures: Sequence[np.ndarray]) -> list[Detections]:
    """Return the detections in pictures uint8 [S, S, 3], on the CPU."""
    pixels: Tensor = torch.from_numpy(np.stack([*pictures])).permute(0, 3, 1, 2)
    return [Detections(*(part.cpu() for part in found)) for found in model.detect(pixels)]
