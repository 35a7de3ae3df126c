"""Drawings of scenes to look at: the best of each caption beside a real scene, with the oracle's verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from limner.evaluation import report
from limner.evaluation.composition import Composition
from limner.tasks.rendering import render
from limner.tasks.scenes import Scene


@dataclass(frozen=True)
class Shown:
    """A caption with the real scene and its candidates: uint8 [N, 3, H, W], scores [N], verdicts [N]."""

    caption: str
    scene: Scene
    pictures: Tensor
    scores: np.ndarray
    right: np.ndarray

    @property
    def best(self) -> int:
        return int(self.scores.argmax())

    def picture(self, i: int) -> Image.Image:
        return Image.fromarray(self.pictures[i].permute(1, 2, 0).contiguous().numpy())

    def real(self) -> Image.Image:
        return Image.fromarray(render(self.scene, self.pictures.shape[-1]))


def shown(asked: Iterable[tuple[str, Scene]], pictures: Iterable[Tensor], result: Composition) -> list[Shown]:
    """The first captions that were asked for, as many as there are pictures kept, each with its candidates'."""
    return [
        Shown(caption, scene, part, scores, right)
        for (caption, scene), part, scores, right in zip(asked, pictures, result.scores, result.right, strict=False)
    ]


def sheet(shown: Sequence[Shown]) -> Image.Image:
    """The best drawing of each caption beside the real scene."""
    rows = []
    for one in shown:
        right = bool(one.right[one.best])
        label = f"{'right' if right else 'wrong'}, score {float(one.scores[one.best]):.2f}"
        pictures = [(one.picture(one.best), label), (one.real(), "a real scene")]
        rows.append(report.Row(caption=one.caption, pictures=pictures, right=right))
    return report.contact_sheet(rows, columns=min(4, len(rows)))
