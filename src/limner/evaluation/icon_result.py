"""Results of an evaluation of icons (`icons.py`) as a table and as JSON. Intervals are clustered by subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from limner.errors import escape_control
from limner.evaluation.confidence import Proportion
from limner.json_files import write_json

Verdicts = dict[str, np.ndarray]  # by respect ("subject", "style", ...): right or not, or the share that is right, [B]


@dataclass(frozen=True)
class IconResult:
    """Verdicts on the drawings of B captions of a split, or of a kind of pairs.

    Attributes:
        name: title of the split or kind.
        captions, subjects: of the drawings, [B].
        verdicts: by row of the table ("best of 16", "any candidate", "real pictures", ...) and respect.
        chance: accuracy of a uniform guess, by respect.
        pictures: best drawings, uint8 [B, 3, H, W].
        settings: of the generation.
    """

    name: str
    captions: list[str]
    subjects: list[str]
    verdicts: dict[str, Verdicts]
    chance: dict[str, float]
    pictures: Tensor
    settings: dict[str, Any]

    def rates(self) -> dict[str, dict[str, Proportion]]:
        return {
            row: {respect: Proportion.from_values(values, self.subjects) for respect, values in verdicts.items()}
            for row, verdicts in self.verdicts.items()
        }

    def table(self) -> str:
        """Format the table in lines of less than 80 columns, with the interval of the first respect."""
        respects = list(self.chance)
        subjects, repeats = len(set(self.subjects)), self.settings["repeats"]
        captions = len(self.captions) // repeats  # not the distinct ones: two pairs can have the same caption
        lines = [
            f"{escape_control(self.name)}, {captions:,} captions of {subjects:,} subjects, drawn {repeats} times",
            f"  {'':<33}{respects[0]:<26}" + "".join(f"{name:>9}" for name in respects[1:]),
        ]
        for row, rates in self.rates().items():
            first, *others = rates.values()
            lines.append(f"  {row:<33}{first!s:<26}" + "".join(f"{rate.value:>9.1%}" for rate in others))
        first, *others = (f"{value:.2%}" for value in self.chance.values())
        lines.append(f"  {'chance':<33}{first:>6}{'':<20}" + "".join(f"{value:>9}" for value in others))
        return "\n".join(line.rstrip() for line in lines)

    def to_dict(self) -> dict[str, Any]:
        rates = {
            row: {respect: rate.to_dict() for respect, rate in rates.items()} for row, rates in self.rates().items()
        }
        cases = [
            {"caption": caption, "subject": subject}
            | {
                row: {respect: round(float(values[i]), 4) for respect, values in verdicts.items()}
                for row, verdicts in self.verdicts.items()
            }
            for i, (caption, subject) in enumerate(zip(self.captions, self.subjects, strict=True))
        ]
        return {"name": self.name, "rates": rates, "chance": self.chance, "settings": self.settings, "cases": cases}


def save(path: str | Path, classifier_accuracy: dict[str, float], results: Sequence[IconResult]) -> None:
    """Write all results as JSON."""
    data = {"classifier": classifier_accuracy, "results": [result.to_dict() for result in results]}
    write_json(path, data, ensure_ascii=False)
