"""Pictures of a data set of icons for its evaluation: splits, held-out pairs, and the copying baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.errors import UserError
from limner.evaluation.icon_classifier import LabeledIcons
from limner.evaluation.nearest_neighbor import ReferenceSet

#: Splits and their titles in tables: training pictures, and the two reasons to hold a picture out.
SPLITS = {"combination": "held-out combinations", "subject": "held-out subjects", "train": "training captions"}


@dataclass(frozen=True)
class HeldOutPairs:
    """P held-out pairs.

    Attributes:
        pictures: uint8 [P, 3, H, W].
        captions: first caption of each pair.
        kinds: transform of the lower half: "style", "upside down", ...
        subjects, styles: of the lower halves.
    """

    pictures: Tensor
    captions: list[str]
    kinds: list[str]
    subjects: list[str]
    styles: list[str]


@dataclass(frozen=True)
class Icons:
    """Pictures of a data set of icons.

    Attributes:
        references: the M single pictures. A key is the subject, a family the subject without its skin tone, a split one
            of `SPLITS`.
        styles: of the single pictures, [M].
        pairs: held-out pairs.
    """

    references: ReferenceSet
    styles: list[str]
    pairs: HeldOutPairs

    @staticmethod
    def from_source(source: Source, size: int) -> Icons:
        """Read a whole source at `size` pixels per side, without the samples that cannot be read.

        Raises `UserError` if no sample has a subject and a style.
        """
        indices, pictures, captions, _ = ImageCaptionDataset(source, size).load(np.arange(len(source)))
        meta = [source.meta(int(i)) for i in indices]
        icons = [i for i, m in enumerate(meta) if "subject" in m and "style" in m]
        single = [i for i in icons if "pair" not in meta[i]]
        pairs = [i for i in icons if isinstance(meta[i].get("pair"), dict) and meta[i].get("split") == "held-out"]
        if not single:
            raise UserError(
                "no sample has a subject and a style in its metadata: name the output of `limner data icons`"
            )

        def first_value(samples: Sequence[int], *keys: str) -> list[str]:
            """Return the value of the first key that a sample has."""
            return [next(str(meta[i][key]) for key in keys if key in meta[i]) for i in samples]

        splits = [
            str(meta[i].get("held_out", "combination")) if meta[i].get("split") == "held-out" else "train"
            for i in single
        ]
        return Icons(
            ReferenceSet(
                pictures[single],
                [captions[i][0] for i in single],
                first_value(single, "subject"),
                first_value(single, "base", "subject"),
                splits,
            ),
            first_value(single, "style"),
            HeldOutPairs(
                pictures[pairs],
                [captions[i][0] for i in pairs],
                [str(meta[i]["pair"].get("kind")) for i in pairs],
                first_value(pairs, "base", "subject"),
                [str(meta[i]["pair"].get("style", meta[i]["style"])) for i in pairs],
            ),
        )

    @property
    def labeled(self) -> LabeledIcons:
        """Training data of the classifier: all single pictures."""
        return LabeledIcons(self.references.pictures, self.references.families, self.styles)

    def style_distances(self) -> dict[tuple[str, str], float]:
        """Return the mean squared error between two styles over their common training subjects, if there are any."""
        references, by_style = self.references, dict[str, dict[str, int]]()
        for i in references.split_indices("train"):
            by_style.setdefault(self.styles[i], {}).setdefault(references.keys[i], i)
        distances = {}
        for a, in_a in by_style.items():
            for b, in_b in by_style.items():
                if a < b and (shared := sorted(in_a.keys() & in_b.keys())):
                    left, right = (references.pictures[[side[key] for key in shared]].float() for side in (in_a, in_b))
                    distances[a, b] = distances[b, a] = float(F.mse_loss(left, right))
        return distances

    def nearest_style_copies(self, targets: Sequence[int]) -> list[int | None]:
        """Return for each target the training picture of its subject in the nearest other style, preferably with the
        same skin tone; None if training does not have the subject."""
        references, distances, by_family = self.references, self.style_distances(), dict[str, list[int]]()
        for i in references.split_indices("train"):
            by_family.setdefault(references.families[i], []).append(i)

        def cost(t: int, i: int) -> tuple[float, bool]:
            return distances.get((self.styles[t], self.styles[i]), np.inf), references.keys[i] != references.keys[t]

        pools = (
            [i for i in by_family.get(references.families[t], []) if self.styles[i] != self.styles[t]] for t in targets
        )
        return [min(pool, key=lambda i: cost(t, i), default=None) for t, pool in zip(targets, pools, strict=True)]
