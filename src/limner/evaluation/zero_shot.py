"""Zero-shot classification with the contrastive model (Radford et al. 2021, §3.1).

A class is a name put into several prompts. The class embedding is the mean of its prompt embeddings, normalized. A
picture belongs to the class with the highest cosine similarity. The classes of scenes are the 40 colored shapes, tested
on scenes with one object of a held-out combination. The classes of a data set are the names of its pictures, in the
format of `limner data emoji`.

Shapes: B pictures of H x W pixels, C classes, K prompts of T tokens per class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from limner.data.sample import Source
from limner.errors import UserError
from limner.evaluation.confidence import TEST_SEEDS_FROM, Estimate, proportion
from limner.evaluation.generate_batches import attribute_key
from limner.evaluation.nearest_neighbor import ReferenceSet
from limner.evaluation.result import EvalResult
from limner.models.contrastive import CLIP
from limner.progress import Advance
from limner.tasks.rendering import render
from limner.tasks.scenes import BACKGROUNDS, COLORS, SHAPES, SIZES, Split, sample_scene
from limner.text.bpe import Tokenizer

TOP_K = (1, 5)
EMOJI_PROMPTS = ("{}", "{} emoji")
SCENE_PROMPTS = tuple(
    f"a {size} {fill}{{}} on a {background} background"
    for fill, size, background in product(("", "striped ", "outlined "), SIZES, BACKGROUNDS)
)
_BATCH_SIZE = 256


@dataclass(frozen=True)
class ZeroShotTask:
    """Pictures to classify."""

    pictures: Tensor  # uint8 [B, 3, H, W]
    labels: list[int]  # class index of each picture, [B]
    clusters: list[str]  # of the pictures, for intervals (`confidence.py`), [B]
    names: list[str]  # of the classes, [C]
    prompts: Sequence[str]  # texts with "{}" for the name, [K]


def scene_task(count: int, size: int, split: Split = "held-out", seed: int = TEST_SEEDS_FROM) -> ZeroShotTask:
    """Sample scenes with one object; its color and shape are the class. Scene i depends only on the seed and i."""
    names = [f"{color} {shape}" for color, shape in product(COLORS, SHAPES)]
    pictures, labels, clusters = [], [], []
    for i in range(count):
        scene = sample_scene(np.random.default_rng([seed, i]), count=1, split=split)
        pictures.append(torch.from_numpy(render(scene, size)).permute(2, 0, 1))
        labels.append(names.index(f"{scene.objects[0].color} {scene.objects[0].shape}"))
        clusters.append(attribute_key(scene))
    return ZeroShotTask(torch.stack(pictures), labels, clusters, names, SCENE_PROMPTS)


def dataset_task(source: Source, size: int, split: str, count: int, seed: int = TEST_SEEDS_FROM) -> ZeroShotTask:
    """Sample pictures of a split; all names of the data set are classes. Raises `UserError` for an empty split."""
    data = ReferenceSet.from_source(source, size)
    rows = data.split_indices(split, count, seed)
    if not rows:
        raise UserError(f"split {split!r} of the data is empty: choose another split")
    names = list(dict.fromkeys(data.captions))
    labels, families = [names.index(data.captions[i]) for i in rows], [data.families[i] for i in rows]
    return ZeroShotTask(data.pictures[rows], labels, families, names, EMOJI_PROMPTS)


def evaluate(model: CLIP, tokenizer: Tokenizer, task: ZeroShotTask, progress: Advance | None = None) -> EvalResult:
    """Classify the pictures. `progress` advances by prompts and pictures.

    A picture is right in row "top k" if its class is among the k most similar ones.
    """
    length, device = model.config.text_len, next(model.parameters()).device
    text = [tokenizer.encode([prompt.format(name) for prompt in task.prompts], length) for name in task.names]
    similarity = cosine_similarity(model, torch.stack(text).to(device), task.pictures, progress)
    ranks = similarity.argsort(dim=1, descending=True, stable=True)
    labels = torch.tensor(task.labels)[:, None]
    classes, prompts = len(task.names), len(task.prompts)
    rows = {}
    for k in (k for k in TOP_K if k < classes):
        right = proportion((ranks[:, :k] == labels).any(1).numpy(), task.clusters)
        rows[f"top {k}"] = {"accuracy": right, "chance": Estimate(value=k / classes, spec=".2%")}
    title = f"{len(task.labels):,} pictures, {classes:,} classes, {prompts} prompts each"
    return EvalResult(title=title, rows=rows, settings={"classes": classes, "prompts": prompts})


@torch.inference_mode()
def cosine_similarity(
    model: CLIP, prompts: Tensor, pictures: UInt8[Tensor, "B 3 H W"], progress: Advance | None = None
) -> Float[Tensor, "B C"]:
    """Return the cosine similarity of pictures uint8 [B, 3, H, W] and classes, prompts int64 [C, K, T] -> [B, C]."""
    device = next(model.parameters()).device

    def encode_batches(values: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        encoded = []
        for batch in values.split(_BATCH_SIZE):
            encoded.append(encode(batch.to(device)))
            if progress:
                progress(len(batch))
        return torch.cat(encoded)

    texts = encode_batches(prompts.flatten(0, 1), model.encode_text).unflatten(0, prompts.shape[:2])
    classes = F.normalize(texts.mean(1), dim=-1)
    return (encode_batches(pictures, model.encode_image) @ classes.T).cpu()
