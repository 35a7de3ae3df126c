from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from importlib import import_module
from inspect import isclass
from math import inf, nan
from pathlib import Path
from pkgutil import walk_packages
from typing import Annotated, Literal, get_type_hints

import pytest

import limner
from limner.config import (
    Checked,
    OutOfRange,
    Range,
    differences,
    from_dict,
    leaves,
    load_json,
    override,
    ranges,
    save_json,
    to_dict,
)
from limner.errors import UserError


class Fill(Enum):
    SOLID = "solid"
    STRIPED = "striped"


@dataclass(frozen=True, kw_only=True)
class Flat:
    pass


@dataclass(frozen=True, kw_only=True)
class Ramp:
    end: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int
    grid: tuple[int, int] = (8, 8)
    widths: tuple[float, ...] = (1.0,)
    kind: Literal["row", "column"] = "row"

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError("width must be even")


@dataclass(frozen=True, kw_only=True)
class Run:
    model: Model = field(default_factory=lambda: Model(width=4))
    schedule: Flat | Ramp = Flat()
    schedules: tuple[Flat | Ramp, ...] | None = None
    fill: Fill = Fill.SOLID
    lr: float = 1e-3
    name: str | None = None
    shuffle: bool = True
    data: Path = Path("data")
    weights: dict[str, float] = field(default_factory=dict)


FULL = Run(
    model=Model(width=6, grid=(2, 3), widths=(1.0, 2.5), kind="column"),
    schedule=Ramp(end=0.1),
    schedules=(Flat(), Ramp(end=2.0)),
    fill=Fill.STRIPED,
    name="x",
    weights={"text": 0.125},
)


@pytest.mark.parametrize("run", [Run(), FULL])
def test_a_config_survives_the_disk(run: Run, tmp_path: Path) -> None:
    save_json(run, tmp_path / "run.json")
    assert load_json(Run, tmp_path / "run.json") == run


def test_absent_keys_keep_their_defaults() -> None:
    assert from_dict(Run, {"lr": 1}) == Run(lr=1.0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"modle": {}}, "no setting 'modle' (did you mean 'model'?)"),
        ({"model": {"widht": 4}}, "model has no setting 'widht' (did you mean 'width'?)"),
        ({"model": {}}, "model lacks 'width'"),
        ({"model": {"width": 3}}, "model: width must be even"),
        ({"model": {"width": 4.0}}, "model.width must be a whole number, not 4.0"),
        ({"model": {"width": True}}, "model.width must be a whole number"),
        ({"model": {"width": 4, "grid": [1]}}, "model.grid must be a list of 2 values"),
        ({"model": {"width": 4, "grid": [1, "2"]}}, "model.grid[1] must be a whole number"),
        ({"model": {"width": 4, "kind": "colum"}}, "(did you mean 'column'?)"),
        ({"model": 4}, "model must be the settings of a Model"),
        ({"lr": "fast"}, "lr must be a number, not 'fast'"),
        ({"lr": None}, "lr must be a number, not None"),
        ({"shuffle": 1}, "shuffle must be true or false"),
        ({"fill": "stripes"}, "(did you mean 'striped'?)"),
        ({"schedule": {"type": "Rmap"}}, "(did you mean 'Ramp'?)"),
        ({"schedule": {"type": ["Ramp"]}}, "schedule needs a 'type'"),
        ({"schedule": {"type": "Ramp", "ned": 1}}, "schedule has no setting 'ned'"),
        ({"schedules": [{"end": 1}]}, "schedules[0] needs a 'type': choose 'Flat', 'Ramp'"),
        ({"weights": {"text": "much"}}, "weights.text must be a number"),
        ([], "the config must be the settings of a Run"),
    ],
)
def test_a_mistake_is_named_with_its_place(data, says: str) -> None:
    with pytest.raises(UserError) as error:
        from_dict(Run, data)
    assert says in str(error.value)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b" " * (5 << 20)])
def test_a_file_that_is_no_config_is_a_user_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"run\.json"):
        load_json(Run, path)
    with pytest.raises(UserError, match=r"absent\.json"):
        load_json(Run, tmp_path / "absent.json")


def test_override_by_dotted_path() -> None:
    assert override(FULL, {"model.width": 8, "lr": 1e-4}) == replace(FULL, model=replace(FULL.model, width=8), lr=1e-4)
    with pytest.raises(UserError, match="did you mean 'width'"):
        override(FULL, {"model.widht": 8})
    with pytest.raises(UserError, match="did you mean 'model'"):
        override(FULL, {"mode.width": 8})


def test_differences_are_dotted_paths() -> None:
    changed = override(FULL, {"model.width": 8, "schedule": {"type": "Flat"}})
    assert differences(to_dict(FULL), to_dict(changed)) == [
        "model.width",
        "schedule.type",
        "schedule.end",
    ]


@dataclass(frozen=True, kw_only=True)
class Bounded(Checked):
    lr: Annotated[float, Range(above=0)] = 1.0
    betas: Annotated[tuple[float, ...], Range(0, below=1)] = ()
    steps: Annotated[int | None, Range(1, 1_000_000)] = None
    name: str = ""


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
        ({"lr": "1"}, "lr must be a number, not '1'"),
        ({"lr": True}, "lr must be a number, not True"),
        ({"lr": None}, "lr must be a number, not None"),
        ({"betas": (0.5, 1.0)}, "betas must be below 1, not 1.0"),
        ({"betas": (-0.1, 0.5)}, "betas must be at least 0, not -0.1"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"steps": 10**400}, "steps must be at most 1,000,000, not a number of 401 digits"),
    ],
)
def test_a_field_keeps_to_the_range_in_its_annotation(wrong, says):
    with pytest.raises(OutOfRange) as error:
        Bounded(**wrong)
    assert str(error.value) == says
    with pytest.raises(OutOfRange):
        replace(Bounded(), **wrong)
    if all(not isinstance(value, (str, bool, type(None))) and value != 1.5 for value in wrong.values()):
        with pytest.raises(UserError) as told:
            from_dict(Outer, {"inner": wrong})
        assert str(told.value) == f"inner.{says}"


def test_ends_none_and_whole_numbers_for_floats_are_in_range():
    assert Bounded(lr=1, betas=(0, 0.999), steps=1_000_000).steps == 1_000_000
    assert Bounded(steps=None) == Bounded()
    with pytest.raises(UserError, match="inner.lr must be a finite number, not a number of 401 digits"):
        from_dict(Outer, {"inner": {"lr": 10**400}})


# Made by the program, not by people: their numbers are measured, counted or read off something that was checked.
MADE = tuple(
    f"limner.{name}"
    for name in (
        "bundles", "drawing", "pipeline", "data.", "evaluation.", "layers.", "metrics.", "profiling.", "runs.stages",
        "training.", "worlds.",
    )
)  # fmt: skip
SET = ("limner.data.filters.Filters", "limner.evaluation.composition.Settings", "limner.training.loop.TrainConfig")


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
    found = {cls: {f.name: leaves(get_type_hints(cls)[f.name]) for f in fields(cls)} for cls in settings()}
    numbers = [
        (cls, name, kinds) for cls, names in found.items() for name, kinds in names.items() if kinds & {int, float}
    ]
    assert len(numbers) > 120
    for cls, name, kinds in numbers:
        if cls is not Range:
            where = f"{cls.__module__}.{cls.__qualname__}.{name}"
            assert issubclass(cls, Checked), where
            assert name in ranges(cls), where
            assert float in kinds or ranges(cls)[name][0].most is not None, where
