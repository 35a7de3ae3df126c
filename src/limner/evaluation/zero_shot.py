"""Zero-shot classification with the contrastive model (Radford et al. 2021, §3.1).

A class is a name put into several prompts. The vectors of its prompts are averaged, and a picture belongs to the class
whose average is nearest. The classes of scenes are the 40 colored shapes, of scenes with one thing of a held-out
combination; the classes of a data set are the names of its pictures, as `limner data emoji` writes them.

Shapes: B pictures of H x W pixels, C classes, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from limner.data.sample import Source
from limner.errors import UserError
from limner.evaluation.confidence import PUBLISHED, Rate
from limner.evaluation.generate_batches import combination
from limner.evaluation.nearest_neighbor import Gallery
from limner.json_files import write_json
from limner.models.contrastive import Contrastive
from limner.progress import Advance
from limner.tasks.rendering import render
from limner.tasks.scenes import BACKGROUNDS, COLORS, SHAPES, SIZES, Split, sample_scene
from limner.text.bpe import Tokenizer

TOP = (1, 5)  # a picture is right if its class is among so many
EMOJI_PROMPTS = ("{}", "{} emoji")
SCENE_PROMPTS = (
    *(f"a {size} {{}} on a {background} background" for size, background in product(SIZES, BACKGROUNDS)),
    *(f"a {size} striped {{}} on a {background} background" for size, background in product(SIZES, BACKGROUNDS)),
    *(f"a {size} outlined {{}} on a {background} background" for size, background in product(SIZES, BACKGROUNDS)),
)
_READ = 256  # pictures or prompts encoded at a time


@dataclass(frozen=True)
class Task:
    """Pictures to classify.

    Attributes:
        pictures: uint8 [B, 3, H, W].
        labels: the index of each picture's class, [B].
        clusters: pictures of one cluster are alike (see `confidence.py`), [B].
        names: of the C classes.
        prompts: texts with "{}" in the place of the name.
    """

    pictures: Tensor
    labels: list[int]
    clusters: list[str]
    names: list[str]
    prompts: Sequence[str]


def scenes(count: int, size: int, split: Split = "held-out", seed: int = PUBLISHED) -> Task:
    """Fresh scenes of one thing, whose color and shape is asked for. Scene i depends on the seed and i alone."""
    names = [f"{color} {shape}" for color, shape in product(COLORS, SHAPES)]
    pictures, labels, clusters = [], [], []
    for i in range(count):
        scene = sample_scene(np.random.default_rng([seed, i]), count=1, split=split)
        pictures.append(torch.from_numpy(render(scene, size)).permute(2, 0, 1))
        labels.append(names.index(f"{scene.things[0].color} {scene.things[0].shape}"))
        clusters.append(combination(scene))
    return Task(torch.stack(pictures), labels, clusters, names, SCENE_PROMPTS)


def pictures_of(source: Source, size: int, split: str, count: int, seed: int = PUBLISHED) -> Task:
    """Pictures of a data set among all its names. Raises `UserError` if it has none of the split."""
    gallery = Gallery.of(source, size)
    chosen = gallery.choose(split, count, seed)
    if not chosen:
        raise UserError(f"the data has no picture in the split {split!r}")
    names = list(dict.fromkeys(gallery.captions))
    index = {name: i for i, name in enumerate(names)}
    return Task(
        gallery.pictures[chosen], [index[gallery.captions[i]] for i in chosen], [gallery.families[i] for i in chosen],
        names, EMOJI_PROMPTS,
    )  # fmt: skip


@dataclass(frozen=True)
class ZeroShotResult:
    """Whether the class of each picture is among the first k: bool [B] by k."""

    right: dict[int, np.ndarray]
    classes: int
    clusters: list[str]
    prompts: int  # of each class

    def rates(self) -> dict[int, Rate]:
        return {k: Rate.of(values, self.clusters) for k, values in self.right.items()}

    def table(self) -> str:
        lines = [f"{len(self.clusters):,} pictures, {self.classes:,} classes, {self.prompts} prompts each"]
        lines += [
            f"  right among the first {k:<3} {rate}   by chance {min(1, k / self.classes):.2%}"
            for k, rate in self.rates().items()
        ]
        return "\n".join(lines)

    def save(self, path: str | Path, model: str) -> None:
        """As JSON, with the name of the model."""
        settings = {"model": model, "prompts": self.prompts}
        rates = {f"top {k}": rate.to_dict() for k, rate in self.rates().items()}
        write_json(path, {"rates": rates, "classes": self.classes, "settings": settings}, indent=1)


def evaluate(model: Contrastive, tokenizer: Tokenizer, task: Task, progress: Advance | None = None) -> ZeroShotResult:
    """Classify the pictures. `progress` is advanced by prompts and pictures."""
    length, device = model.config.text_len, next(model.parameters()).device
    text = [tokenizer.encode([prompt.format(name) for prompt in task.prompts], length) for name in task.names]
    found = logits(model, torch.stack(text).to(device), task.pictures, progress)
    ranks = found.argsort(dim=1, descending=True, stable=True)
    labels = torch.tensor(task.labels)[:, None]
    right = {k: (ranks[:, :k] == labels).any(1).numpy() for k in TOP if k < len(task.names)}
    return ZeroShotResult(right, len(task.names), task.clusters, len(task.prompts))


@torch.inference_mode()
def logits(
    model: Contrastive, prompts: Tensor, pictures: UInt8[Tensor, "B 3 H W"], progress: Advance | None = None
) -> Float[Tensor, "B C"]:
    """Cosines of pictures and classes: prompts int64 [C, K, T], pictures uint8 [B, 3, H, W] -> [B, C]."""
    device = next(model.parameters()).device

    def parts(values: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        made = []
        for part in values.split(_READ):
            made.append(encode(part.to(device)))
            if progress:
                progress(len(part))
        return torch.cat(made)

    texts = parts(prompts.flatten(0, 1), model.encode_text).unflatten(0, prompts.shape[:2])
    classes = F.normalize(texts.mean(1), dim=-1)
    return (parts(pictures, model.encode_image) @ classes.T).cpu()
