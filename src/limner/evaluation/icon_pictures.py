"""The pictures of a data set of icons, as their evaluation asks for them: single ones in splits, held-out pairs, and
copies, which are the baseline of held-out combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from limner.data.datasets import ImageCaptionDataset
from limner.data.sample import Source
from limner.errors import UserError
from limner.evaluation.icon_classifier import Labelled
from limner.evaluation.nearest_neighbor import Gallery

#: Training, and why a drawing is held out, as metadata have it; and their titles in tables.
SPLITS = {"combination": "held-out combinations", "subject": "held-out subjects", "train": "training captions"}


@dataclass(frozen=True)
class HeldOutPairs:
    """The held-out pairs, P of them.

    Attributes:
        pictures: uint8 [P, 3, H, W].
        captions: the first phrasing of each.
        kinds: "style", "upside down", ...
        subjects, styles: of the lower halves.
    """

    pictures: Tensor
    captions: list[str]
    kinds: list[str]
    subjects: list[str]
    styles: list[str]


@dataclass(frozen=True)
class Icons:
    """The pictures of a data set of icons.

    Attributes:
        gallery: the M single pictures. A key is the subject, a family the subject without skin tones, a split one of
            `SPLITS`.
        styles: of the single pictures, [M].
        pairs: the held-out ones.
    """

    gallery: Gallery
    styles: list[str]
    pairs: HeldOutPairs

    @staticmethod
    def of(source: Source, size: int) -> Icons:
        """Read a whole source at `size` pixels per side; samples that cannot be read are left out.

        Raises `UserError` if none has a subject and a style.
        """
        found, pictures, captions, _ = ImageCaptionDataset(source, size).load(np.arange(len(source)))
        facts = [source.meta(int(i)) for i in found]
        drawings = [i for i, fact in enumerate(facts) if "subject" in fact and "style" in fact]
        single = [i for i in drawings if "pair" not in facts[i]]
        pairs = [i for i in drawings if isinstance(facts[i].get("pair"), dict) and facts[i].get("split") == "held-out"]
        if not single:
            raise UserError("no sample has a subject and a style in its metadata: give what `limner data icons` wrote")

        def says(which: Sequence[int], *keys: str) -> list[str]:
            """For each sample the value of the first of these keys that it has."""
            return [next(str(facts[i][key]) for key in keys if key in facts[i]) for i in which]

        splits = [
            str(facts[i].get("held_out", "combination")) if facts[i].get("split") == "held-out" else "train"
            for i in single
        ]
        return Icons(
            Gallery(
                pictures[single],
                [captions[i][0] for i in single],
                says(single, "subject"),
                says(single, "base", "subject"),
                splits,
            ),
            says(single, "style"),
            HeldOutPairs(
                pictures[pairs],
                [captions[i][0] for i in pairs],
                [str(facts[i]["pair"].get("kind")) for i in pairs],
                says(pairs, "base", "subject"),
                [str(facts[i]["pair"].get("style", facts[i]["style"])) for i in pairs],
            ),
        )

    @property
    def labelled(self) -> Labelled:
        """Training data of a judge: all single pictures."""
        return Labelled(self.gallery.pictures, self.gallery.families, self.styles)

    def distances(self) -> dict[tuple[str, str], float]:
        """Mean squared error between the pictures of two styles, over the subjects that training has in both. Styles
        without a common subject have no entry."""
        gallery, of = self.gallery, dict[str, dict[str, int]]()
        for i in gallery.choose("train"):
            of.setdefault(self.styles[i], {}).setdefault(gallery.keys[i], i)
        found = {}
        for a, ours in of.items():
            for b, theirs in of.items():
                if a < b and (shared := sorted(ours.keys() & theirs.keys())):
                    left, right = (gallery.pictures[[side[key] for key in shared]].float() for side in (ours, theirs))
                    found[a, b] = found[b, a] = float(F.mse_loss(left, right))
        return found

    def copies(self, wanted: Sequence[int]) -> list[int | None]:
        """For each wanted picture the training picture of its subject in the nearest other style, with the same skin
        tone if there is one; None if the subject is not in training."""
        gallery, distances, of = self.gallery, self.distances(), dict[str, list[int]]()
        for i in gallery.choose("train"):
            of.setdefault(gallery.families[i], []).append(i)

        def cost(w: int, i: int) -> tuple[float, bool]:
            return distances.get((self.styles[w], self.styles[i]), np.inf), gallery.keys[i] != gallery.keys[w]

        others = ([i for i in of.get(gallery.families[w], []) if self.styles[i] != self.styles[w]] for w in wanted)
        return [min(those, key=lambda i: cost(w, i), default=None) for w, those in zip(wanted, others, strict=True)]
