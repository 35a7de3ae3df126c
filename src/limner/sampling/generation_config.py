"""Settings of generation. The module does not import torch, so that a command line is parsed before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

from limner.errors import UserError
from limner.validation import SEEDS, InvalidSetting, Range, Validated

CANDIDATES = Range(1, 2**16)  # candidates of a caption
UNSET = -1  # among prompt tokens, marks a position to sample


@dataclass(frozen=True, kw_only=True)
class Sampler(Validated):
    """Settings that turn image logits into tokens. None stands for the model's default."""

    temperature: Annotated[float | None, Range(0, 100)] = None
    """1 samples the learned distribution, lower values give less variety, 0 takes the likeliest token (greedy); the
    model's own temperature by default."""
    top_k: Annotated[int | None, Range(1, 2**24)] = None
    """Sample only among the k likeliest tokens."""
    top_p: Annotated[float | None, Range(gt=0, le=1)] = None
    """Sample only among the likeliest tokens that together have this probability (nucleus sampling)."""
    guidance: Annotated[float | None, Range(0, 100)] = None
    """Scale of classifier-free guidance: 1 turns it off, above 1 follows the caption more closely (for a prior trained
    with caption dropout); the model's own scale by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature is not None and 0 < self.temperature < 0.01:
            raise InvalidSetting("temperature", f"must be 0 (greedy) or at least 0.01, not {self.temperature}")

    @property
    def guided(self) -> bool:
        """True if guidance changes the logits."""
        return self.guidance not in (1, None)

    def with_defaults(self, defaults: Sampler) -> Sampler:
        """Fill in unset settings from `defaults`."""
        missing = {setting.name for setting in fields(Sampler) if getattr(self, setting.name) is None}
        return replace(self, **{name: getattr(defaults, name) for name in missing})

    def to_metadata(self) -> dict[str, Any]:
        """Settings as pictures and results of evaluations record them."""
        return {setting.name: getattr(self, setting.name) for setting in fields(Sampler)}


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Sampler):
    """Settings of generation. Model, caption, settings and candidate number determine a picture."""

    candidates: Annotated[int | None, CANDIDATES] = None
    """Number of candidates to generate and rank; the model's own number by default, else 16 for commands, 64 in
    Python."""
    seed: Annotated[int, SEEDS] = 0
    """Seed of the random numbers; other seeds give other pictures."""

    def resolve(self, n: int, defaults: ModelDefaults, changes: Mapping[str, Any]) -> tuple[GenerationConfig, int]:
        """Return the settings with changes, and the number of candidates for `n` drawings. Raises `UserError` if one is
        out of range."""
        if n < 1:
            raise UserError(f"n, the number of drawings, must be at least 1, not {n}")
        try:
            options = replace(self, **changes)
        except InvalidSetting as error:
            raise UserError(str(error)) from None
        return options, max(n, options.candidates or defaults.candidates or 64)


_PRIOR_SCORE_WEIGHTS = Range(0, 100)


class ModelDefaults(NamedTuple):
    """A model's own settings of drawing, from the info of its bundle.

    Attributes:
        prior_score_weight: weight of the prior's log-probability in `Drawing.score`.
        candidates: number of candidates; None is the caller's default.
    """

    sampler: Sampler
    prior_score_weight: float
    candidates: int | None

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> ModelDefaults:
        """Read and check a bundle's info. Raises `UserError` if a value has another type or is out of range."""

        def number(setting: str, default: float) -> float:
            value = info.get(setting, default)
            if type(value) not in (int, float):
                raise UserError(f"the model's {setting} must be a number, not {value!r}: correct its config.json")
            return value

        try:
            sampler = Sampler(temperature=number("temperature", 1.0), guidance=number("guidance", 1.0))
            _PRIOR_SCORE_WEIGHTS.check("prior_score_weight", weight := number("prior_score_weight", 0.0))
            return cls(sampler, weight, GenerationConfig(candidates=info.get("candidates")).candidates)
        except InvalidSetting as error:
            raise UserError(f"the model's {error}: correct its config.json") from None
