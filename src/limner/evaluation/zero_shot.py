"""Zero-shot classification with the contrastive model (Radford et al. 2021, §3.1).

A class is a name put into several prompts. The class embedding is the mean of its prompt embeddings, normalized. A
picture belongs to the class with the highest cosine similarity. The classes of scenes are the 40 colored shapes, tested
on scenes with one object of a held-out combination. The classes of a data set are the captions of its pictures, or the
names of its folders in ImageNet's layout; a file may give them other names, or more classes.

Shapes: b pictures of a batch, H x W pixels, C classes, K prompts of T tokens per class, E embedding.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from limner.atomic_io import require_file
from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Rejected, Source, format_reasons
from limner.errors import UserError
from limner.evaluation.confidence import TEST_SEEDS_FROM, Estimate, proportion
from limner.evaluation.generate_batches import attribute_key
from limner.evaluation.result import EvalResult
from limner.models.contrastive import CLIP
from limner.pretrained import ASSETS
from limner.progress import Advance
from limner.reranker import Reranker
from limner.tasks.rendering import render
from limner.tasks.scenes import BACKGROUNDS, COLORS, SHAPES, SIZES, Split, sample_scene

TOP_K = (1, 5)
#: The 80 prompts of Radford et al. 2021 for ImageNet, in the format of `read_prompts`.
IMAGENET_PROMPTS = ASSETS / "imagenet_prompts.txt"
EMOJI_PROMPTS = ("{}", "{} emoji")
SCENE_PROMPTS = tuple(
    f"a {size} {fill}{{}} on a {background} background"
    for fill, size, background in product(("", "striped ", "outlined "), SIZES, BACKGROUNDS)
)
_PREPROCESSING = {  # by augmentation
    "none": "central square resized to {} pixels by area, values from -1 to 1",
    "bicubic": "shorter side resized to {} pixels by Pillow's bicubic filter, center crop, mean and deviation of CLIP",
}
_BATCH_SIZE = 256
_MAX_LINES_BYTES = 4 << 20
_WORDNET_ID = re.compile(r"n\d{8}")


class LabeledPictures(NamedTuple):
    """A batch of pictures, uint8 [b, 3, H, W], with the class index and the cluster (`confidence.py`) of each."""

    pictures: Tensor
    labels: list[int]
    clusters: list[str]


@dataclass(frozen=True, kw_only=True)
class ZeroShotTask:
    """Pictures to classify.

    Attributes:
        batches: the pictures, read while they are iterated over.
        count: number of the pictures, with unreadable ones.
        names: names of the C classes.
        prompts: K texts with "{}" for the name.
        preprocessing: of the pictures, in words.
        rejected: numbers of unreadable pictures by reason, complete after the iteration.
    """

    batches: Iterable[LabeledPictures]
    count: int
    names: Sequence[str]
    prompts: Sequence[str]
    preprocessing: str
    rejected: Counter[str] = field(default_factory=Counter)


def read_prompts(path: Path) -> list[str]:
    """Read prompt templates, one per line with "{}" for the name of the class; "#" begins a comment.

    Raises `UserError` for a line without "{}" and a file without templates.
    """
    prompts = _read_lines(path)
    if wrong := [line for line in prompts if line.count("{}") != 1]:
        raise UserError(f"{path}: the template {wrong[0][:80]!r} must have one {{}}, the place of the class's name")
    return prompts


def read_classes(path: Path) -> dict[str, str]:
    """Read the names of classes by label (a caption, or the name of a folder), one class per line.

    A line is a label, a tab and a name; a WordNet id, a space and a name; or a name that is also the label. Underscores
    in names stand for spaces. Raises `UserError` for a label that is given twice and a file without classes.
    """
    classes: dict[str, str] = {}
    for line in _read_lines(path):
        *before, name = re.split(r"(?<=^n\d{8})\s+|\t", line, maxsplit=1)
        label = before[0] if before else name
        if label in classes:
            raise UserError(f"{path} has the class {label[:80]!r} twice: remove a line")
        classes[label] = name.replace("_", " ")
    if repeated := [f"{count} times {name!r}" for name, count in Counter(classes.values()).items() if count > 1]:
        warnings.warn(f"{path}: classes of one name cannot be distinguished: {', '.join(repeated[:5])}", stacklevel=2)
    return classes


def _read_lines(path: Path) -> list[str]:
    require_file(path)
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_LINES_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from None
    if lines := [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]:
        return lines
    raise UserError(f"{path} is empty: write one entry per line")


def scene_task(
    count: int,
    size: int,
    split: Split = "held-out",
    seed: int = TEST_SEEDS_FROM,
    prompts: Sequence[str] = SCENE_PROMPTS,
) -> ZeroShotTask:
    """Sample scenes with one object; its color and shape are the class. Scene i depends only on the seed and i."""
    names = [f"{color} {shape}" for color, shape in product(COLORS, SHAPES)]

    def batches() -> Iterator[LabeledPictures]:
        for begin in range(0, count, _BATCH_SIZE):
            scenes = [
                sample_scene(np.random.default_rng([seed, i]), count=1, split=split)
                for i in range(begin, min(count, begin + _BATCH_SIZE))
            ]
            objects = [scene.objects[0] for scene in scenes]
            yield LabeledPictures(
                torch.stack([torch.from_numpy(render(scene, size)).permute(2, 0, 1) for scene in scenes]),
                [names.index(f"{item.color} {item.shape}") for item in objects],
                [attribute_key(scene) for scene in scenes],
            )

    return ZeroShotTask(
        batches=batches(), count=count, names=names, prompts=prompts, preprocessing=f"drawn at {size} pixels"
    )


def dataset_task(
    source: Source,
    size: int,
    split: str,
    count: int,
    seed: int = TEST_SEEDS_FROM,
    *,
    prompts: Sequence[str] = EMOJI_PROMPTS,
    classes: Mapping[str, str] | None = None,
    augment: str = "none",
) -> ZeroShotTask:
    """Sample pictures of a split; the first caption of a picture is its label.

    Args:
        classes: names of the classes by label; by default all labels of the data set are names.
        augment: resizing of the pictures, one of `data/augment.py`.

    Raises:
        UserError: the split is empty, or a label lacks a class.
    """
    labels, rows, clusters, rejected = {}, [], {}, Counter[str]()
    for i in range(len(source)):
        try:
            labels[i], meta = source.captions(i)[0], source.meta(i)
        except Rejected as error:
            rejected[error.reason] += 1
            continue
        clusters[i] = str(meta.get("family", meta.get("emoji", i)))
        if str(meta.get("split", "train")) == split:
            rows.append(i)
    if not rows:
        raise UserError(f"split {split!r} of the data is empty: choose another split")
    classes = classes or {label: label.replace("_", " ") for label in labels.values()}
    if unknown := sorted(set(labels.values()) - set(classes)):
        raise UserError(f"the file of classes lacks {unknown[0][:80]!r}, a class of the data: add a line")
    if unnamed := [name for name in classes.values() if _WORDNET_ID.fullmatch(name)]:
        raise UserError(f"the class {unnamed[0]!r} is a WordNet id: name it by --classes FILE, as in n01440764 tench")
    if count < len(rows):
        rows = sorted(np.random.default_rng(seed).choice(rows, count, replace=False).tolist())
    dataset, index = ImageCaptionDataset(source, size, augment), {label: i for i, label in enumerate(classes)}

    def batches() -> Iterator[LabeledPictures]:
        for begin in range(0, len(rows), _BATCH_SIZE):
            good, pictures, _, reasons = dataset.load(np.array(rows[begin : begin + _BATCH_SIZE]))
            rejected.update(reasons)
            read = good.tolist()
            yield LabeledPictures(pictures, [index[labels[i]] for i in read], [clusters[i] for i in read])

    return ZeroShotTask(
        batches=batches(), count=len(rows), names=list(classes.values()), prompts=prompts, rejected=rejected,
        preprocessing=_PREPROCESSING[augment].format(size),
    )  # fmt: skip


@torch.inference_mode()
def evaluate(reranker: Reranker, task: ZeroShotTask, progress: Advance | None = None) -> EvalResult:
    """Classify the pictures. `progress` advances by prompts and pictures.

    A picture is right in row "top k" if its class is among the k most similar ones. Raises `UserError` if all pictures
    are unreadable.
    """
    model, advance = reranker.model, progress or (lambda _: None)
    texts = [prompt.replace("{}", name) for name in task.names for prompt in task.prompts]
    tokens = reranker.tokenizer.encode(texts, model.config.text_len)
    embeddings = class_embeddings(model, tokens.unflatten(0, (len(task.names), -1)), advance)
    ranks, clusters, device = [], [], embeddings.device
    for batch in task.batches:
        if batch.labels:
            similarity = model.encode_image(batch.pictures.to(device)) @ embeddings.mT
            order = similarity.argsort(dim=1, descending=True, stable=True).cpu()
            ranks.append((order == torch.tensor(batch.labels)[:, None]).int().argmax(1))
        clusters += batch.clusters
        advance(len(batch.labels))
    skipped = format_reasons(task.rejected)
    if not ranks:
        raise UserError(f"none of the {task.count} pictures can be read ({skipped}): check the data")
    rank, classes, prompts = torch.cat(ranks).numpy(), len(task.names), len(task.prompts)
    rows = {
        f"top {k}": {"accuracy": proportion(rank < k, clusters), "chance": Estimate(value=k / classes, spec=".2%")}
        for k in TOP_K
        if k < classes
    }
    title = f"{len(rank):,} pictures, {classes:,} classes, {prompts} prompts each"
    settings = {
        "classes": classes,
        "prompts": prompts,
        "preprocessing": task.preprocessing,
        "skipped": dict(task.rejected),
    }
    return EvalResult(title=f"{title}, skipped {skipped}" if skipped else title, rows=rows, settings=settings)


def class_embeddings(
    model: CLIP, prompts: Int64[Tensor, "C K T"], progress: Callable[[int], object]
) -> Float[Tensor, "C E"]:
    """Return the normalized mean of each class's prompt embeddings: int64 [C, K, T] -> [C, E] of unit length."""
    device, encoded = next(model.parameters()).device, []
    for batch in prompts.flatten(0, 1).split(_BATCH_SIZE):
        encoded.append(model.encode_text(batch.to(device)))
        progress(len(batch))
    return F.normalize(torch.cat(encoded).unflatten(0, prompts.shape[:2]).mean(1), dim=-1)
