"""GenEval's tasks (Ghosh et al. 2023) on synthetic scenes and on icons: prompts, verdicts, and its layout of folders.

A prompt belongs to a task, which says what is checked: a single object and two objects by their shapes, counting by the
number of objects of a shape, colors and attribute binding (`color_attr`) also by colors, position by a relation. Sizes,
fills and the background, which prompts also name, are not checked. The objects are those that the scene parser finds.
The overall score is the mean of the tasks. A drawing of an icon is a single object, which a detector finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from limner.atomic_io import atomic_write_text
from limner.evaluation.confidence import TEST_SEEDS_FROM, Estimate, proportion
from limner.evaluation.detection import TrainedDetector, detect
from limner.evaluation.generate_batches import generate_batches, to_image
from limner.evaluation.icon_composites import one_icon
from limner.evaluation.icon_pictures import Icons
from limner.evaluation.report import SheetRow, save_png
from limner.evaluation.result import EvalResult
from limner.json_files import to_json
from limner.pipeline import TextToImage
from limner.progress import Advance
from limner.sampling.generation_config import Sampler
from limner.tasks import captions, scene_reader, scenes
from limner.tasks.scenes import Split

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
DRAWINGS = 4  # of each prompt, as in GenEval
_SHEET_PROMPTS = 12
MIN_SCORE = 0.3  # of a detection that counts, as in GenEval


class Prompt(NamedTuple):
    """A prompt with the objects that its task names, in the form of GenEval's metadata.

    `include` has the `class` (a shape), `count`, for some tasks the `color`, and the `position` relative to an element
    of `include`; `exclude` has numbers of objects that are too many.
    """

    tag: str
    prompt: str
    include: tuple[Mapping[str, Any], ...]
    exclude: tuple[Mapping[str, Any], ...] = ()


def sample_prompts(count: int, seed: int = TEST_SEEDS_FROM, split: Split = "held-out") -> list[Prompt]:
    """Sample `count` prompts, which cycle through the tasks. Prompt i depends only on the seed and i."""
    return [_sample(TASKS[i % len(TASKS)], np.random.default_rng([seed, i, 3]), split) for i in range(count)]


def _sample(tag: str, rng: np.random.Generator, split: Split) -> Prompt:
    count = {"single_object": 1, "colors": 1, "counting": int(rng.integers(2, 5))}.get(tag, 2)
    while True:
        scene = scenes.sample_scene(rng, count=count, split=split, identical=float(tag == "counting"))
        prompt = captions.describe(scene, rng)
        claims = captions.parse(prompt)
        assert claims is not None
        shapes = [shape for *_, shape in claims.attributes]
        if count == 2 and tag != "counting" and len(set(shapes)) < 2:
            continue  # shapes distinguish two objects
        if tag == "position" and claims.relation is None:
            continue
        if tag == "counting":
            shape = {"class": shapes[0]}
            return Prompt(tag, prompt, ({**shape, "count": count},), ({**shape, "count": count + 1},))
        include: list[dict[str, Any]] = [{"class": shape, "count": 1} for shape in shapes]
        if tag in ("colors", "color_attr"):
            include = [{**item, "color": named[2]} for item, named in zip(include, claims.attributes, strict=True)]
        if tag == "position":
            include = [include[1], {**include[0], "position": [claims.relation, 0]}]
        return Prompt(tag, prompt, tuple(include))


def icon_prompts(
    icons: Icons, count: int, seed: int = TEST_SEEDS_FROM, split: Split = "held-out"
) -> tuple[list[Prompt], np.ndarray]:
    """Return captions of at most `count` icons, uint8 [N, S, S, 3], of a split, and the icons. Training pictures show
    the subjects of held-out ones in other styles."""
    references = icons.references
    chosen = references.split_indices("combination" if split == "held-out" else "train", count, seed)
    rows = [({"class": references.families[i], "count": 1}, references.captions[i]) for i in chosen]
    prompts = [Prompt("single_object", caption, (item,)) for item, caption in rows]
    return prompts, references.pictures[chosen].permute(0, 2, 3, 1).contiguous().numpy()


class Found(NamedTuple):
    """An object that a detector finds, named as a `SceneObject` is."""

    shape: str
    color: str | None = None


def read_scenes(pictures: np.ndarray) -> list[Sequence[Any]]:
    """Return the objects that the scene parser finds in each picture, uint8 [N, S, S, 3]."""
    return [scene_reader.read(picture).objects for picture in pictures]


def read_icons(detector: TrainedDetector, pictures: np.ndarray) -> list[Sequence[Any]]:
    """Return the objects that a detector of icons finds in each picture, uint8 [N, S, S, 3]."""
    size = detector.model.layout.size
    found = detect(detector.model, [one_icon(picture, size) for picture in pictures])
    return [[Found(detector.classes[k - 1]) for k in one.labels[one.scores >= MIN_SCORE].tolist()] for one in found]


def is_right(prompt: Prompt, objects: Sequence[Any]) -> bool:
    """Return True if the objects of a picture, with shape and color, are those that the task names."""

    def found(item: Mapping[str, Any]) -> list[Any]:
        named = item["class"], item.get("color")
        return [x for x in objects if x.shape == named[0] and named[1] in (None, x.color)]

    chosen = [found(item) for item in prompt.include]
    if any(len(xs) < item["count"] for xs, item in zip(chosen, prompt.include, strict=True)):
        return False
    if any(len(found(item)) >= item["count"] for item in prompt.exclude):
        return False
    return all(
        any(relation in captions.center_relations(x, other) for x in xs for other in chosen[target])
        for xs, item in zip(chosen, prompt.include, strict=True)
        if (position := item.get("position"))
        for relation, target in [position]
    )


def evaluate(
    pipe: TextToImage,
    prompts: Sequence[Prompt],
    read: Callable[[np.ndarray], list[Sequence[Any]]] = read_scenes,
    *,
    candidates: int = DRAWINGS,
    seed: int = TEST_SEEDS_FROM,
    sampler: Sampler = Sampler(),
    folder: Path | None = None,
    progress: Advance | None = None,
) -> EvalResult:
    """Draw each prompt, check the best four of its candidates by `read`, and write them into `folder`.

    Intervals are over prompts. Raises `ValueError` if there are fewer than four candidates.
    """
    if candidates < DRAWINGS:
        raise ValueError(f"candidates must be at least {DRAWINGS}, not {candidates}")
    right, cases, sheet = np.zeros((len(prompts), DRAWINGS)), [], []
    texts = [prompt.prompt for prompt in prompts]
    for part, batch in generate_batches(pipe, texts, candidates, seed, sampler, progress=progress):
        for i, pictures, scores in zip(part, batch.pictures, batch.scores, strict=True):
            best = pictures[scores.argsort(descending=True)[:DRAWINGS]]
            objects = read(best.permute(0, 2, 3, 1).contiguous().numpy())
            right[i] = [is_right(prompts[i], found) for found in objects]
            cases.append({**_metadata(prompts[i]), "right": right[i].astype(int).tolist()})
            if folder:
                _write(folder / f"{i:05d}", prompts[i], best)
            if i < _SHEET_PROMPTS:
                labels = [
                    (to_image(picture), "right" if ok else "wrong") for picture, ok in zip(best, right[i], strict=True)
                ]
                caption = f"{prompts[i].tag}: {prompts[i].prompt}"
                sheet.append(SheetRow(caption=caption, pictures=labels, right=bool(right[i, 0])))
    rows = {tag: _share(right, [i for i, prompt in enumerate(prompts) if prompt.tag == tag]) for tag in TASKS}
    rows = {tag: estimate for tag, estimate in rows.items() if estimate}
    overall = Estimate(value=float(np.mean([estimate.value for estimate in rows.values()])), spec=".1%")
    return EvalResult(
        title=f"{len(prompts):,} prompts, best {DRAWINGS} of {candidates} drawings each",
        rows={name: {"right": estimate} for name, estimate in {**rows, "overall": overall}.items()},
        cases=cases,
        settings={"model": pipe.name, "candidates": candidates, "seed": seed},
        sheet=sheet,
    )


def _share(right: np.ndarray, prompts: Sequence[int]) -> Estimate | None:
    return proportion(right[prompts].mean(1), [str(i) for i in prompts]) if len(prompts) else None


def _metadata(prompt: Prompt) -> dict[str, Any]:
    return {key: value for key, value in prompt._asdict().items() if value}


def _write(folder: Path, prompt: Prompt, pictures: Tensor) -> None:
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder / "metadata.jsonl", f"{to_json(_metadata(prompt))}\n")
    for k, picture in enumerate(pictures):
        save_png(to_image(picture), folder / "samples" / f"{k:05d}.png")
