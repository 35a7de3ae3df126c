"""What an evaluation of icons found (`icons.py`): as a table and as JSON. Intervals are over subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from limner.errors import printable
from limner.evaluation.confidence import Rate
from limner.json_files import write_json

Verdicts = dict[str, np.ndarray]  # by respect ("subject", "style", ...): right or not, [B], or the share that is right


@dataclass(frozen=True)
class IconResult:
    """The verdicts on B drawings of a split, or of a kind of pairs.

    Attributes:
        name: title of the split or kind.
        captions, subjects: what was to be drawn, [B].
        figures: by row of the table ("best of 16", "any candidate", "real pictures", ...), verdicts by respect.
        chance: the probability that a uniform guess is right, by respect.
        pictures: uint8 [B, 3, H, W], the best drawings.
    """

    name: str
    captions: list[str]
    subjects: list[str]
    figures: dict[str, Verdicts]
    chance: dict[str, float]
    pictures: Tensor
    settings: dict[str, Any]

    def rates(self) -> dict[str, dict[str, Rate]]:
        return {
            way: {respect: Rate.of(values, self.subjects) for respect, values in verdicts.items()}
            for way, verdicts in self.figures.items()
        }

    def table(self) -> str:
        """For people, in lines of less than 80 columns: the interval is of the first respect."""
        respects = list(self.chance)
        subjects, times = len(set(self.subjects)), self.settings["repeats"]
        captions = len(self.captions) // times  # two pairs may have one caption
        lines = [
            f"{printable(self.name)}, {captions:,} captions of {subjects:,} subjects, drawn {times} times",
            f"  {'':<33}{respects[0]:<26}" + "".join(f"{name:>9}" for name in respects[1:]),
        ]
        for way, rates in self.rates().items():
            first, *others = rates.values()
            lines.append(f"  {way:<33}{first!s:<26}" + "".join(f"{rate.value:>9.1%}" for rate in others))
        first, *others = (f"{value:.2%}" for value in self.chance.values())
        lines.append(f"  {'chance':<33}{first:>6}{'':<20}" + "".join(f"{value:>9}" for value in others))
        return "\n".join(line.rstrip() for line in lines)

    def to_dict(self) -> dict[str, Any]:
        rates = {
            way: {respect: rate.to_dict() for respect, rate in those.items()} for way, those in self.rates().items()
        }
        cases = [
            {"caption": caption, "subject": subject}
            | {
                way: {respect: round(float(values[i]), 4) for respect, values in verdicts.items()}
                for way, verdicts in self.figures.items()
            }
            for i, (caption, subject) in enumerate(zip(self.captions, self.subjects, strict=True))
        ]
        return {"name": self.name, "rates": rates, "chance": self.chance, "settings": self.settings, "cases": cases}


def save(path: str | Path, judge: dict[str, float], results: Sequence[IconResult]) -> None:
    """All results as JSON."""
    write_json(path, {"judge": judge, "results": [result.to_dict() for result in results]}, ensure_ascii=False)
