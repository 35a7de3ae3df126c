"""Phases of the demo: number of training steps, its folder, and resuming after damage."""

import pytest

from limner.errors import UserError
from limner.recipes import presets
from limner.runs import demo
from limner.runs.demo import limit_steps


@pytest.mark.parametrize(("seconds", "prior", "contrastive"), [(0.01, 3_000, 1_000), (1.0, 240, 240), (1e4, 1, 1)])
def test_steps_are_those_of_the_recipe_or_fewer(tmp_path, monkeypatch, seconds, prior, contrastive):
    monkeypatch.setattr("limner.runs.time_estimate.seconds_per_step", lambda *_: seconds)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = limit_steps(presets.demo(), tmp_path, max_seconds=300)
    assert (recipe.prior.training.steps, recipe.contrastive.training.steps) == (prior, contrastive)
    monkeypatch.setattr("limner.runs.time_estimate.seconds_per_step", lambda *_: 5 * seconds)
    assert limit_steps(presets.demo(), tmp_path) == recipe


def test_a_step_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = limit_steps(presets.demo(), tmp_path)
    assert 1 <= recipe.contrastive.training.steps <= 1_000
    assert 1 <= recipe.prior.training.steps <= 3_000


def test_files_of_a_killed_demo_are_accepted(tmp_path):
    for name in (".demo.json.0123abcd.tmp", ".lock"):
        (tmp_path / name).touch()
    demo.claim_folder(tmp_path, {"scenes": 1})
    demo.claim_folder(tmp_path, {"scenes": 1})
    with pytest.raises(UserError, match="other settings"):
        demo.claim_folder(tmp_path, {"scenes": 2})
    (tmp_path / "demo.json").unlink()
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="no demo"):
        demo.claim_folder(tmp_path, {"scenes": 1})


def test_incomplete_scenes_are_written_again(tmp_path):
    demo.write_data(tmp_path / "data", 3, "described")
    (tmp_path / "data" / "INCOMPLETE").touch()  # removed last when complete
    demo.write_data(tmp_path / "data", 3, "described")
    assert not (tmp_path / "data" / "INCOMPLETE").exists()


WRONG = (
    b"", b"null", b"[]", b"3", b"[" * 100_000, b'{"prior": 5}', b'{"prior": "x", "contrastive": []}',
    b'{"prior": 1e999}', b'{"prior": null, "contrastive": 7}',
)  # fmt: skip


def test_damaged_numbers_are_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "affordable_steps", lambda *_: {"prior": 5, "contrastive": 7})
    for content in WRONG:
        for name in ("steps.json", "timings.json", "composition.json"):
            (tmp_path / name).write_bytes(content)
        recipe = limit_steps(presets.demo(), tmp_path)
        assert (recipe.prior.training.steps, recipe.contrastive.training.steps) == (5, 7)
        with demo.timed_phase(tmp_path, "prior"), demo.timed_phase(tmp_path, "drawing"):
            pass
        assert {"prior", "drawing"} <= demo.read_numbers(tmp_path / "timings.json").keys()
        assert demo.load_drawings(tmp_path / "steps.json", "key") is None
    (tmp_path / "steps.json").write_text('{"prior": 1e9, "contrastive": -3.5}')  # clamped to the recipe's steps
    recipe = limit_steps(presets.demo(), tmp_path)
    assert (recipe.prior.training.steps, recipe.contrastive.training.steps) == (3_000, 1)
