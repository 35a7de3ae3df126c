"""Before it trains, a run says how long that will take here: from few steps, quickly, and whatever happens."""

from dataclasses import replace

import pytest
import torch

from limner import recipes
from limner.cli import main
from limner.errors import UserError
from limner.recipes.recipe import PretrainedDVAE
from limner.runs import time_estimate
from limner.runs.train import train_all
from limner.tasks.build_scenes import write_scenes
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


def told(monkeypatch, seconds, recipe, out, stages=STAGES, smaller="laptop"):
    """What is said where steps take so many seconds, and the stages that were tried, with their threads."""
    tried = []

    def takes(model, stage, *_):
        name = next(name for name in STAGES if getattr(recipe, name) == stage)
        tried.append((name, torch.get_num_threads()))
        return seconds[name]

    monkeypatch.setattr(time_estimate, "seconds_per_step", takes)
    said = []
    monkeypatch.setattr("builtins.print", lambda *lines, **_: said.extend(lines))
    time_estimate.tell(recipe, out, stages, smaller)
    return said, tried


def test_each_stage_has_a_line_and_what_trains_together_counts_once(monkeypatch, two_threads, tmp_path):
    recipe = with_steps(tiny_recipe(), dvae=6_000, prior=7_200, contrastive=1_440)
    said, tried = told(monkeypatch, {"dvae": 0.5, "prior": 2.0, "contrastive": 1.0}, recipe, tmp_path)
    assert said == [
        "a few steps of each stage were tried, on this machine as busy as it is now:",
        "  dVAE: 6,000 steps, about 50 minutes",
        "  prior: 7,200 steps, about 4 hours beside the other",  # with all threads when the other is done
        "  contrastive model: 1,440 steps, about 30 minutes beside the other",
        "all of it takes about 5 hours",
    ]
    assert tried == [("dvae", 2), ("prior", 1), ("prior", 2), ("contrastive", 1)] and two_threads[-1] == 2
    said, _ = told(monkeypatch, {"prior": 2.0}, recipe, tmp_path, ("prior",))
    assert said[1:] == ["  prior: 7,200 steps, about 4 hours", "all of it takes about 4 hours"]


def test_more_than_a_day_names_the_smaller_recipe_and_tries_no_further(monkeypatch, two_threads, tmp_path):
    """16 seconds per step are what the dVAE of `photos` was measured to take on two cores."""
    photos = recipes.get("photos")
    said, tried = told(monkeypatch, {"dvae": 16.0}, photos, tmp_path, smaller=recipes.fallback_recipe("photos"))
    assert said[-1] == "the dVAE alone takes about 222 hours: --recipe laptop is a smaller one"
    assert [name for name, _ in tried] == ["dvae"]
    said, _ = told(monkeypatch, {"dvae": 16.0}, photos, tmp_path, smaller=None)
    assert said[-1] == "the dVAE alone takes about 222 hours: lower the steps"
    said, _ = told(monkeypatch, {"dvae": 0.1, "prior": 16.0}, photos, tmp_path)
    assert said[-1].startswith("the prior alone takes about 556 hours")  # 1.25 beside the other
    together = with_steps(tiny_recipe(), dvae=72_000, prior=72_000, contrastive=101)
    said, _ = told(monkeypatch, {"dvae": 1.0, "prior": 0.5, "contrastive": 0.5}, together, tmp_path)
    assert said[-1] == "all of it takes about 30 hours: --recipe laptop is a smaller one"


def test_only_what_takes_a_larger_machine_has_a_smaller_recipe():
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
    said, tried = told(monkeypatch, {"contrastive": 0.01}, recipe, tmp_path)
    assert [name for name, _ in tried] == ["contrastive"]
    assert said[1] == "  prior: 430,000 steps of a model that is too large to be tried"
    assert said[-1] == "all of it takes more than 83 minutes: --recipe laptop is a smaller one"
    said, _ = told(monkeypatch, {}, recipe, tmp_path, ("prior",))
    assert said[-1].startswith("all of it takes longer than can be tried: ")


def test_nothing_is_said_where_little_is_left(monkeypatch, two_threads, tmp_path):
    recipe = with_steps(tiny_recipe(), dvae=6_000, prior=100, contrastive=6_001)
    (tmp_path / "dvae/checkpoints/step-00005950").mkdir(parents=True)
    (tmp_path / "contrastive/checkpoints/step-00005901").mkdir(parents=True)
    assert told(monkeypatch, {}, recipe, tmp_path) == ([], [])
    (tmp_path / "dvae/checkpoints/step-00005950").rename(tmp_path / "dvae/checkpoints/step-00003000")
    said, tried = told(monkeypatch, {"dvae": 0.5}, recipe, tmp_path)
    assert said[1] == "  dVAE: 3,000 steps, about 25 minutes" and len(tried) == 1


def test_a_trial_that_fails_stops_nothing(monkeypatch, two_threads, tmp_path, capsys):
    monkeypatch.setattr(time_estimate, "trial", lambda *_: 1 / 0)
    time_estimate.tell(with_steps(tiny_recipe(), dvae=6_000), tmp_path, STAGES)
    assert capsys.readouterr().err == "how long training will take cannot be tried (ZeroDivisionError)\n"
    assert two_threads[-1] == 2


@pytest.mark.parametrize("size", [1, 2, 16, 512])
@pytest.mark.parametrize(("fixed", "each"), [(0.6, 0.2), (0.001, 0.004), (0.01, 3.0), (5.0, 0.0)])
def test_a_whole_batch_follows_from_a_few_samples(monkeypatch, size, fixed, each):
    """Where a step takes a fixed time and some for each sample, what is found is exact, in bounded time."""
    clock = [0.0]

    def update(run, batch):
        clock[0] += fixed + each * len(batch["pixels"])

    monkeypatch.setattr(time_estimate, "update", update)
    monkeypatch.setattr(time_estimate.time, "monotonic", lambda: clock[0])
    recipe = tiny_recipe()
    stage = replace(recipe.dvae, training=replace(recipe.dvae.training, batch_size=size))
    model, _, batches = time_estimate.trial(recipe, "dvae")
    assert time_estimate.seconds_per_step(model, stage, batches, 1.2) == pytest.approx(fixed + each * size)
    assert clock[0] < 6 * (fixed + each) + 6


@pytest.mark.parametrize("augment", [False, True])
def test_every_stage_can_be_tried_and_leaves_the_callers_random_numbers(monkeypatch, tmp_path, capsys, augment):
    recipe = with_steps(tiny_recipe(), dvae=200, prior=200, contrastive=200)
    recipe = replace(recipe, prior=replace(recipe.prior, augment=augment))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    time_estimate.tell(recipe, tmp_path, STAGES)
    assert torch.equal(torch.rand(3), expected)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all("about" in line for line in lines[1:]), lines


def test_the_command_tells_it_when_the_run_is_known_to_be_possible(tmp_path, monkeypatch, capsys):
    """Before anything is trained, and not by a command that is refused."""
    write_scenes(tmp_path / "data", 8, 0, size=24)
    monkeypatch.setattr(recipes, "get", lambda name: with_steps(tiny_recipe(), dvae=2, prior=200, contrastive=2))
    monkeypatch.setattr("limner.runs.stages.Stages.dvae", lambda *_, **__: (_ for _ in ()).throw(UserError("here")))
    command = ["train", str(tmp_path / "data"), "--recipe", "photos", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "  prior: 200 steps, about " in err and err.endswith("limner: here\n")
    assert main([*command, "--contrastive.model.patch", "7"]) == 2
    assert "tried" not in capsys.readouterr().err


def test_stages_are_told_of_once(tmp_path):
    write_scenes(tmp_path / "data", 8, 0, size=24)
    asked = []
    recipe = with_steps(tiny_recipe(), dvae=1, prior=1, contrastive=1)
    train_all(recipe, tmp_path / "data", tmp_path / "run", ("dvae",), asked.append)
    train_all(recipe, tmp_path / "data", tmp_path / "run", before=asked.append)
    assert asked == [("dvae",), STAGES]
