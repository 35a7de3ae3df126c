"""Time estimates before training: their lines, totals and advice, and that they never stop a run."""

from dataclasses import replace

import pytest
import torch

from limner import recipes
from limner.cli import main
from limner.errors import UserError
from limner.recipes.recipe import PretrainedDVAE, resolve
from limner.runs import time_estimate
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from tiny import tiny_recipe

STAGES = ("dvae", "prior", "contrastive")


def with_steps(recipe, **steps):
    return replace(
        recipe,
        **{
            name: replace(getattr(recipe, name), training=replace(getattr(recipe, name).training, steps=n))
            for name, n in steps.items()
        },
    )


@pytest.fixture
def two_threads(monkeypatch):
    threads = [2]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads[-1])
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    return threads


def estimate(monkeypatch, seconds, recipe, out, stages=STAGES, fallback="laptop"):
    """Return the lines for given seconds per step, and the timed stages with their threads."""
    timed = []

    def step_seconds(model, stage, *_):
        name = next(name for name in STAGES if getattr(recipe, name) == stage)
        timed.append((name, torch.get_num_threads()))
        return seconds[name]

    monkeypatch.setattr(time_estimate, "seconds_per_step", step_seconds)
    lines = []
    monkeypatch.setattr("builtins.print", lambda *printed, **_: lines.extend(printed))
    time_estimate.print_estimate(resolve(recipe), out, stages, fallback)
    return lines, timed


def test_each_stage_has_a_line_and_parallel_stages_count_once(monkeypatch, two_threads, tmp_path):
    recipe = with_steps(tiny_recipe(), dvae=6_000, prior=7_200, contrastive=1_440)
    lines, timed = estimate(monkeypatch, {"dvae": 0.5, "prior": 2.0, "contrastive": 1.0}, recipe, tmp_path)
    assert lines == [
        "estimate from a few steps of each stage, at the current load of this machine:",
        "  dVAE: 6,000 steps, about 50 minutes",
        "  prior: 7,200 steps, about 4 hours in parallel",  # with all threads when the other is done
        "  contrastive model: 1,440 steps, about 30 minutes in parallel",
        "training takes about 5 hours",
    ]
    assert timed == [("dvae", 2), ("prior", 1), ("prior", 2), ("contrastive", 1)] and two_threads[-1] == 2
    lines, _ = estimate(monkeypatch, {"prior": 2.0}, recipe, tmp_path, ("prior",))
    assert lines[1:] == ["  prior: 7,200 steps, about 4 hours", "training takes about 4 hours"]


@pytest.mark.parametrize("name", ["scenes", "emoji", "icons", "glyphs", "laptop"])
def test_recipes_for_two_cores_have_an_estimate(monkeypatch, two_threads, tmp_path, name):
    lines, _ = estimate(monkeypatch, dict.fromkeys(STAGES, 0.1), recipes.get(name), tmp_path)
    assert lines[0].startswith("estimate from a few steps"), lines


def test_more_than_a_day_names_the_smaller_recipe_and_stops_timing(monkeypatch, two_threads, tmp_path):
    """16 seconds per step are what the dVAE of `photos` was measured to take on two cores."""
    photos = recipes.get("photos")
    lines, timed = estimate(monkeypatch, {"dvae": 16.0}, photos, tmp_path, fallback=recipes.fallback_recipe("photos"))
    assert lines[-1] == "the dVAE alone takes about 222 hours: --recipe laptop is smaller"
    assert [name for name, _ in timed] == ["dvae"]
    lines, _ = estimate(monkeypatch, {"dvae": 16.0}, photos, tmp_path, fallback=None)
    assert lines[-1] == "the dVAE alone takes about 222 hours: reduce the steps"
    lines, _ = estimate(monkeypatch, {"dvae": 0.1, "prior": 16.0}, photos, tmp_path)
    assert lines[-1].startswith("the prior alone takes about 556 hours")  # 1.25 times longer in parallel
    together = with_steps(tiny_recipe(), dvae=72_000, prior=72_000, contrastive=101)
    lines, _ = estimate(monkeypatch, {"dvae": 1.0, "prior": 0.5, "contrastive": 0.5}, together, tmp_path)
    assert lines[-1] == "training takes about 30 hours: --recipe laptop is smaller"


def test_only_large_recipes_have_a_fallback():
    assert {name for name in recipes.SUMMARIES if recipes.fallback_recipe(name) is None} >= {
        "demo",
        "scenes",
        "emoji",
        "laptop",
    }
    assert all(recipes.fallback_recipe(name) == "laptop" for name in ("photos", "tiny", "dalle-12b"))
    assert recipes.fallback_recipe("my/recipe.json") is None


def test_the_largest_models_are_not_built(monkeypatch, two_threads, tmp_path):
    recipe = replace(recipes.get("dalle-12b"), dvae=PretrainedDVAE())
    lines, timed = estimate(monkeypatch, {"contrastive": 0.01}, recipe, tmp_path)
    assert [name for name, _ in timed] == ["contrastive"]
    assert lines[1] == "  prior: 430,000 steps, too large to time"
    assert lines[-1] == "training takes more than 83 minutes: --recipe laptop is smaller"
    lines, _ = estimate(monkeypatch, {}, recipe, tmp_path, ("prior",))
    assert lines[-1].startswith("training takes an unknown time: ")


def test_few_remaining_steps_have_no_estimate(monkeypatch, two_threads, tmp_path):
    recipe = with_steps(tiny_recipe(), dvae=6_000, prior=100, contrastive=6_001)
    (tmp_path / "dvae/checkpoints/step-00005950").mkdir(parents=True)
    (tmp_path / "contrastive/checkpoints/step-00005901").mkdir(parents=True)
    assert estimate(monkeypatch, {}, recipe, tmp_path) == ([], [])
    (tmp_path / "dvae/checkpoints/step-00005950").rename(tmp_path / "dvae/checkpoints/step-00003000")
    lines, timed = estimate(monkeypatch, {"dvae": 0.5}, recipe, tmp_path)
    assert lines[1] == "  dVAE: 3,000 steps, about 25 minutes" and len(timed) == 1


def test_a_failed_timing_does_not_stop_training(monkeypatch, two_threads, tmp_path, capsys):
    monkeypatch.setattr(time_estimate, "timing_inputs", lambda *_: 1 / 0)
    time_estimate.print_estimate(resolve(with_steps(tiny_recipe(), dvae=6_000)), tmp_path, STAGES)
    assert capsys.readouterr().err == "cannot estimate the training time (ZeroDivisionError)\n"
    assert two_threads[-1] == 2


@pytest.mark.parametrize("size", [1, 2, 16, 512])
@pytest.mark.parametrize(("fixed", "each"), [(0.6, 0.2), (0.001, 0.004), (0.01, 3.0), (5.0, 0.0)])
def test_a_whole_batch_follows_from_a_few_samples(monkeypatch, size, fixed, each):
    """The estimate is exact if a step takes a fixed time plus a time per sample, and its own time is bounded."""
    clock = [0.0]

    def update(run, batch):
        clock[0] += fixed + each * len(batch["pixels"])

    monkeypatch.setattr(time_estimate, "update", update)
    monkeypatch.setattr(time_estimate.time, "monotonic", lambda: clock[0])
    recipe = tiny_recipe()
    stage = replace(recipe.dvae, training=replace(recipe.dvae.training, batch_size=size))
    model, _, batches = time_estimate.timing_inputs(resolve(recipe), "dvae")
    assert time_estimate.seconds_per_step(model, stage, batches, 1.2) == pytest.approx(fixed + each * size)
    assert clock[0] < 6 * (fixed + each) + 6


@pytest.mark.parametrize("augment", [False, True])
def test_every_stage_can_be_timed_and_leaves_the_callers_random_numbers(monkeypatch, tmp_path, capsys, augment):
    recipe = with_steps(tiny_recipe(), dvae=200, prior=200, contrastive=200)
    recipe = replace(recipe, prior=replace(recipe.prior, augment=augment))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    time_estimate.print_estimate(resolve(recipe), tmp_path, STAGES)
    assert torch.equal(torch.rand(3), expected)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all("about" in line for line in lines[1:]), lines


def test_the_command_prints_the_estimate_of_a_valid_run(tmp_path, monkeypatch, capsys):
    """The estimate precedes training; an invalid recipe has none."""
    write_scenes(tmp_path / "data", SceneDataSettings(count=8, size=24))
    monkeypatch.setattr(recipes, "get", lambda name: with_steps(tiny_recipe(), dvae=2, prior=200, contrastive=2))
    monkeypatch.setattr(
        "limner.runs.stages.StageTrainer.train", lambda *_, **__: (_ for _ in ()).throw(UserError("here"))
    )
    command = ["train", str(tmp_path / "data"), "--recipe", "photos", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "  prior: 200 steps, about " in err and err.endswith("limner: here\n")
    assert main([*command, "--contrastive.model.patch", "7"]) == 2
    assert "estimate" not in capsys.readouterr().err


def test_on_start_is_called_once_with_the_stages(tmp_path):
    write_scenes(tmp_path / "data", SceneDataSettings(count=8, size=24))
    started = []

    def on_start(resolved, stages):
        started.append((resolved.recipe, stages))

    recipe = with_steps(tiny_recipe(), dvae=1, prior=1, contrastive=1)
    train_all(recipe, tmp_path / "data", tmp_path / "run", ("dvae",), on_start)
    train_all(recipe, tmp_path / "data", tmp_path / "run", on_start=on_start)
    assert started == [(recipe, ("dvae",)), (recipe, STAGES)]
