"""Contact sheet of scenes: the best drawing of each caption next to a real scene, with its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from limner.evaluation import report
from limner.evaluation.generate_batches import to_image
from limner.tasks.rendering import render, render_pair
from limner.tasks.scenes import Scene, ScenePair


@dataclass(frozen=True)
class SceneSample:
    """A caption, its real scene or pair, and its candidates: pictures uint8 [N, 3, H, W], scores [N], verdicts [N]."""

    caption: str
    scene: Scene | ScenePair
    pictures: Tensor
    scores: np.ndarray
    right: np.ndarray

    @property
    def best(self) -> int:
        return int(self.scores.argmax())

    def picture(self, i: int) -> Image.Image:
        return to_image(self.pictures[i])

    def sheet_row(self) -> report.SheetRow:
        """Return the best drawing with its verdict, and the real scene."""
        right = bool(self.right[self.best])
        label = f"{'right' if right else 'wrong'}, score {float(self.scores[self.best]):.2f}"
        pictures = [(self.picture(self.best), label), (self.real(), "a real scene")]
        return report.SheetRow(caption=self.caption, pictures=pictures, right=right)

    def real(self) -> Image.Image:
        size = self.pictures.shape[-1]
        scene = self.scene
        return Image.fromarray(render(scene, size) if isinstance(scene, Scene) else render_pair(scene, size))


def render_samples(samples: Sequence[SceneSample]) -> Image.Image:
    """Render the best drawing of each caption next to the real scene."""
    return report.contact_sheet([sample.sheet_row() for sample in samples], columns=min(4, len(samples)))
