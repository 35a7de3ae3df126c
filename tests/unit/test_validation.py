import pickle
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from inspect import isclass
from math import inf, nan
from pkgutil import walk_packages
from typing import Annotated, Any, Literal, get_type_hints

import pytest

import limner
from limner.config import from_dict
from limner.errors import UserError
from limner.validation import InvalidSetting, Range, Validated, leaf_types, rules


@dataclass(frozen=True, kw_only=True)
class Bounded(Validated):
    lr: Annotated[float, Range(gt=0)] = 1.0
    betas: Annotated[tuple[float, float], Range(0, lt=1)] = (0.9, 0.99)
    steps: Annotated[int | None, Range(1, 1_000_000)] = None
    name: str = ""
    scaling: Literal["none", "loss", "tensors"] = "none"


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Bounded = field(default_factory=Bounded)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lr": 0.0}, "lr must be above 0, not 0.0"),
        ({"lr": -1.0}, "lr must be above 0, not -1.0"),
        ({"lr": nan}, "lr must be a finite number, not nan"),
        ({"lr": inf}, "lr must be a finite number, not inf"),
        ({"lr": 1e308}, "lr must be at most 1e+37, not 1e+308"),
        ({"lr": "1"}, "lr must be a number, not '1'"),
        ({"lr": True}, "lr must be a number, not True"),
        ({"lr": None}, "lr must be a number, not None"),
        ({"betas": (0.5, 1.0)}, "betas must be below 1, not 1.0"),
        ({"betas": (-0.1, 0.5)}, "betas must be at least 0, not -0.1"),
        ({"betas": (0.5,)}, "betas must be a list of 2 values, not (0.5,)"),
        ({"betas": (0.5, 0.5, 0.5)}, "betas must be a list of 2 values, not (0.5, 0.5, 0.5)"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"steps": 1.5}, "steps must be an integer, not 1.5"),
        ({"steps": 10**400}, "steps must be at most 1,000,000, not a number of 401 digits"),
    ],
)
def test_a_field_keeps_to_the_range_in_its_annotation(wrong, says):
    with pytest.raises(InvalidSetting) as error:
        Bounded(**wrong)
    assert str(error.value) == says
    with pytest.raises(InvalidSetting):
        replace(Bounded(), **wrong)
    if all(not isinstance(value, (str, bool, type(None))) and value != 1.5 for value in wrong.values()):
        with pytest.raises(UserError) as raised:
            from_dict(Outer, {"inner": wrong})
        assert str(raised.value) == f"inner.{says}"


def test_a_misspelt_word_is_refused_in_python_too_with_the_same_sentence():
    word: Any = "tensor"
    with pytest.raises(InvalidSetting, match="^scaling cannot be 'tensor': choose .* .did you mean 'tensors'"):
        Bounded(scaling=word)
    with pytest.raises(UserError, match="scaling cannot be 'tensor': choose .* .did you mean 'tensors'"):
        from_dict(Bounded, {"scaling": "tensor"})


def test_ends_none_and_whole_numbers_for_floats_are_in_range():
    assert Bounded(lr=1, betas=(0, 0.999), steps=1_000_000).steps == 1_000_000
    assert Bounded(steps=None) == Bounded()
    with pytest.raises(UserError, match="inner.lr must be a finite number, not a number of 401 digits"):
        from_dict(Outer, {"inner": {"lr": 10**400}})
    with pytest.raises(InvalidSetting, match="lr must be at most .* not a number of 401 digits"):
        Bounded(lr=10**400)


# Made by the program, not by people: their numbers are measured, counted or read off something that was checked.
MADE = tuple(
    f"limner.{name}"
    for name in (
        "autograd.", "bundles", "drawing", "sampling.engine", "data.", "distributed.gradient_reducers.", "evaluation.",
        "sampling.inference", "sampling.generation.", "attention.", "metrics.", "experiments.", "planner.",
        "profiling.", "runs.run_data", "serve.", "training.", "tasks.",
    )
)  # fmt: skip
SET = (
    "limner.data.filters.Filters",
    "limner.evaluation.composition.CompositionSettings",
    "limner.evaluation.fidelity.FidelitySettings",
    "limner.training.config.TrainConfig",
)


def settings():
    """Every dataclass whose fields people set."""
    for module in walk_packages(limner.__path__, "limner."):
        if module.name.endswith("__main__"):
            continue
        for value in vars(import_module(module.name)).values():
            if isclass(value) and is_dataclass(value) and value.__module__ == module.name:
                name = f"{module.name}.{value.__qualname__}"
                if name in SET or not name.startswith(MADE):
                    yield value


def test_every_number_that_people_set_has_a_range_and_whole_ones_an_upper_end():
    found = {cls: {f.name: leaf_types(get_type_hints(cls)[f.name]) for f in fields(cls)} for cls in settings()}
    numbers = [
        (cls, name, kinds) for cls, names in found.items() for name, kinds in names.items() if kinds & {int, float}
    ]
    assert len(numbers) > 120
    for cls, name, kinds in numbers:
        if cls is not Range:
            where = f"{cls.__module__}.{cls.__qualname__}.{name}"
            assert issubclass(cls, Validated), where
            assert name in rules(cls), where
            assert float in kinds or rules(cls)[name].allowed.le is not None, where


def test_the_error_crosses_between_processes():
    with pytest.raises(InvalidSetting) as caught:
        Bounded(lr=-1.0)
    came = pickle.loads(pickle.dumps(caught.value))
    assert str(came) == str(caught.value) == "lr must be above 0, not -1.0" and came.name == "lr"
