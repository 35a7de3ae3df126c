"""The options of a drawing. They need no torch, so that a command line is read before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from limner.validation import SEEDS, Checked, OutOfRange, Range

CANDIDATES = Range(1, 2**16)  # how many drawings of a caption there may be to choose from


@dataclass(frozen=True, kw_only=True)
class Sampler(Checked):
    """How a token is chosen from image logits."""

    temperature: Annotated[float | None, Range(0, 100)] = None
    """1 samples what was learned, lower is safer and less varied, 0 takes the likeliest; by default the model's own."""
    top_k: Annotated[int | None, Range(1, 2**24)] = None
    """Sample among the k likeliest tokens only."""
    top_p: Annotated[float | None, Range(above=0, most=1)] = None
    """Sample among the likeliest tokens that make up this much probability."""
    guidance: Annotated[float | None, Range(0, 100)] = None
    """Above 1 follows the caption more closely (for a prior trained with captions dropped), 1 is none; by default
    the model's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature is not None and 0 < self.temperature < 0.01:
            raise OutOfRange("temperature", f"must be 0 (the likeliest) or at least 0.01, not {self.temperature}")

    def over(self, own: Sampler) -> Sampler:
        """These settings, and those of `own` where there is none."""
        missing = {setting.name for setting in fields(Sampler) if getattr(self, setting.name) is None}
        return replace(self, **{name: getattr(own, name) for name in missing})

    def facts(self) -> dict[str, Any]:
        """The settings as the files of drawings and evaluations state them."""
        return {setting.name: getattr(self, setting.name) for setting in fields(Sampler)}


@dataclass(frozen=True, kw_only=True)
class Options(Sampler):
    """How a caption is drawn: (model, caption, options, candidate) fix a picture."""

    candidates: Annotated[int, CANDIDATES] = 64
    """How many to draw and choose from."""
    seed: Annotated[int, SEEDS] = 0
    """Another seed gives other drawings."""
