"""Contact sheet of scenes: the best drawing of each caption next to a real scene, with its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from limner.evaluation import report
from limner.evaluation.generate_batches import to_image
from limner.tasks.rendering import render
from limner.tasks.scenes import Scene


@dataclass(frozen=True)
class SceneSample:
    """A caption with its real scene and its candidates: pictures uint8 [N, 3, H, W], scores [N], verdicts [N]."""

    caption: str
    scene: Scene
    pictures: Tensor
    scores: np.ndarray
    right: np.ndarray

    @property
    def best(self) -> int:
        return int(self.scores.argmax())

    def picture(self, i: int) -> Image.Image:
        return to_image(self.pictures[i])

    def real(self) -> Image.Image:
        return Image.fromarray(render(self.scene, self.pictures.shape[-1]))


def render_samples(samples: Sequence[SceneSample]) -> Image.Image:
    """Render the best drawing of each caption next to the real scene."""
    rows = []
    for sample in samples:
        right = bool(sample.right[sample.best])
        label = f"{'right' if right else 'wrong'}, score {float(sample.scores[sample.best]):.2f}"
        pictures = [(sample.picture(sample.best), label), (sample.real(), "a real scene")]
        rows.append(report.SheetRow(caption=sample.caption, pictures=pictures, right=right))
    return report.contact_sheet(rows, columns=min(4, len(rows)))
