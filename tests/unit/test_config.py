from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from limner.config import differences, from_dict, load_json, save_json, to_dict
from limner.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Flat:
    pass


@dataclass(frozen=True, kw_only=True)
class Steep:
    pass


@dataclass(frozen=True, kw_only=True)
class Ramp:
    end: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int
    grid: tuple[int, int] = (8, 8)
    gains: tuple[float, float] = (1.0, 1.0)
    kind: Literal["row", "column"] = "row"

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError("width must be even")


@dataclass(frozen=True, kw_only=True)
class Run:
    model: Model = field(default_factory=lambda: Model(width=4))
    schedule: Flat | Ramp = Flat()
    second: Flat | Ramp | None = None
    slope: Flat | Steep = Flat()
    lr: float = 1e-3
    name: str | None = None
    shuffle: bool = True
    steps: int | None = None
    keys: tuple[str, ...] = ()


FULL = Run(
    model=Model(width=6, grid=(2, 3), gains=(1.0, 2.5), kind="column"),
    schedule=Ramp(end=0.1),
    second=Flat(),
    slope=Steep(),
    name="x",
    steps=3,
    keys=("subject", "set"),
)


@pytest.mark.parametrize("run", [Run(), FULL])
def test_a_config_survives_the_disk(run: Run, tmp_path: Path) -> None:
    save_json(run, tmp_path / "run.json")
    assert load_json(Run, tmp_path / "run.json") == run


def test_a_union_member_without_settings_is_given_by_its_name() -> None:
    assert to_dict(FULL)["slope"] == "steep" and to_dict(FULL)["second"] == {"type": "Flat"}


def test_absent_keys_keep_their_defaults() -> None:
    assert from_dict(Run, {"lr": 1}) == Run(lr=1.0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"modle": {}}, "unknown setting 'modle' (did you mean 'model'?)"),
        ({"model": {"widht": 4}}, "model: unknown setting 'widht' (did you mean 'width'?)"),
        ({"model": {}}, "model lacks 'width'"),
        ({"model": {"width": 3}}, "model: width must be even"),
        ({"model": {"width": 4.0}}, "model.width must be an integer, not 4.0"),
        ({"model": {"width": True}}, "model.width must be an integer"),
        ({"model": {"width": 4, "grid": [1]}}, "model.grid must be a list of 2 values"),
        ({"model": {"width": 4, "grid": [1, "2"]}}, "model.grid[1] must be an integer"),
        ({"model": {"width": 4, "kind": "colum"}}, "(did you mean 'column'?)"),
        ({"model": 4}, "model must be the settings of a Model"),
        ({"lr": "fast"}, "lr must be a number, not 'fast'"),
        ({"lr": None}, "lr must be a number, not None"),
        ({"shuffle": 1}, "shuffle must be true or false"),
        ({"keys": "subject"}, "keys must be a list, not 'subject'"),
        ({"keys": ["subject", 3]}, "keys[1] must be a string"),
        ({"steps": "3"}, "steps must be an integer, not '3'"),
        ({"schedule": {"type": "Rmap"}}, "(did you mean 'Ramp'?)"),
        ({"schedule": {"type": ["Ramp"]}}, "schedule.type cannot be ['Ramp']: choose 'Flat', 'Ramp'"),
        ({"schedule": {"type": "Ramp", "ned": 1}}, "schedule: unknown setting 'ned'"),
        ({"schedule": {"type": "xyzzy"}}, "schedule.type cannot be 'xyzzy': choose 'Flat', 'Ramp'"),
        ({"schedule": "Ramp"}, "schedule must be the settings of a Flat or Ramp, not 'Ramp'"),
        ({"slope": "step"}, "slope cannot be 'step': choose 'flat', 'steep' (did you mean 'steep'?)"),
        ({"slope": {"type": "Flat"}}, "slope cannot be {'type': 'Flat'}: choose 'flat', 'steep'"),
        ({"second": {"end": 1}}, "second needs a 'type': choose 'Flat', 'Ramp'"),
        ({"model": {"width": 4, "grid": 5}}, "model.grid must be a list of 2 values, not 5"),
        ({"model": {"width": 4, "gains": [1, "much"]}}, "model.gains[1] must be a number"),
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


def test_differences_are_dotted_paths() -> None:
    changed = replace(FULL, model=replace(FULL.model, width=8), schedule=Flat())
    assert differences(to_dict(FULL), to_dict(changed)) == [
        "model.width",
        "schedule.type",
        "schedule.end",
    ]
