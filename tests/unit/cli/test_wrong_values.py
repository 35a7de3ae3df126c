"""Unusable values are reported in one sentence, by the name of the option, before any work."""

import json
from dataclasses import is_dataclass, replace
from math import inf, nan
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from limner import recipes
from limner.cli import bench, convert, data, demo, draw, edit, evaluate, finetune, inspect, main, plan, train
from limner.config import from_dict, to_dict
from limner.errors import UserError
from limner.models.dvae import DVAEConfig
from limner.objectives.codebook_elbo import BalancedELB
from limner.objectives.elbo import RelaxedELB
from limner.optim.optimizers import LionConfig, StableAdamWConfig
from limner.optim.schedules import Plateau
from limner.recipes.recipe import DVAEStage, PretrainedDVAE, Recipe
from limner.validation import Validated, rules

COMMANDS = {
    "draw CAPTION": draw.Draw,
    "edit PICTURE CAPTION": edit.Edit,
    "data scenes OUT": data.WriteScenes,
    "data emoji OUT": data.WriteEmoji,
    "data icons OUT set.tgz": data.WriteIcons,
    "data glyphs OUT set.tgz": data.WriteGlyphs,
    "data prepare SOURCE OUT": data.Prepare,
    "data show SOURCE": data.Show,
    "demo": demo.Demo,
    "evaluate all": evaluate.options.ScoreAll,
    "evaluate composition": evaluate.options.ScoreComposition,
    "evaluate pairs": evaluate.options.ScorePairs,
    "evaluate geneval": evaluate.options.ScoreGenEval,
    "evaluate fidelity RUN DATA": evaluate.options.ScoreFidelity,
    "evaluate reconstruction": evaluate.options.ScoreReconstruction,
    "evaluate zero-shot": evaluate.options.ScoreZeroShot,
    "evaluate emoji RUN DATA": evaluate.options.ScoreEmoji,
    "evaluate icons RUN DATA": evaluate.options.ScoreIcons,
    "evaluate glyphs RUN DATA": evaluate.options.ScoreGlyphs,
    "evaluate grid RUN DATA -o grid.png": evaluate.options.DrawGrid,
    "inspect underflow RUN DATA": inspect.UnderflowOptions,
    "finetune scenes DATA --out run": finetune.Finetune,
    "bench": bench.BenchOptions,
    "plan": plan.PlanOptions,
    "convert openai-dvae ENCODER DECODER OUT": convert.OpenAIDVAE,
}
HUGE = "1" + "0" * 400


def wrong(cls: type, name: str) -> list[str]:
    """Values beyond each end of a field's range, and values of another type."""
    allowed, whole, _, _ = rules(cls)[name]
    beyond = {allowed.ge: -1, allowed.le: 1, allowed.gt: -1, allowed.lt: 1}
    found = [str(end + step) for end, step in beyond.items() if end is not None]
    found += [str(end) for end in (allowed.gt, allowed.lt) if end is not None]
    kinds = ["1.5"] if whole else ["-inf", "1e308", "-1e308"]
    return [*found, *kinds, HUGE, "", "x", "nan", "inf", "9" * 5000]


def fields(hint: type, path: str = "", default: object = None):
    """(class, dotted option, field, how many values it takes) of each number in a nest of dataclasses."""
    for name, inner in get_type_hints(hint, include_extras=True).items():
        value = getattr(default, name, None)
        kind = type(value) if is_dataclass(value) else get_args(inner)[0] if get_origin(inner) is Annotated else inner
        if is_dataclass(kind):
            yield from fields(
                kind, path if name in ("filters", "options", "sampler", "settings") else f"{path}{name}.", value
            )
        elif issubclass(hint, Validated) and name in rules(hint) and rules(hint)[name].allowed:
            shape = next((get_args(k) for k in (kind, *get_args(kind)) if get_origin(k) is tuple), ())
            count = 1 if not shape or Ellipsis in shape else len(shape)
            yield hint, f"{path}{name}".replace("_", "-"), name, count


def changed(recipe: Recipe, path: str, value: object) -> Recipe:
    """The recipe with another value at a dotted path, as from a file."""
    data = to_dict(recipe)
    *parents, name = path.split(".")
    inner = data
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    return from_dict(Recipe, data)


def assert_error(arguments, option, capsys):
    """The command ends before any work, with a sentence that names the option."""
    assert main(arguments) == 2, arguments
    out, err = capsys.readouterr()
    assert out == "", arguments
    assert err.startswith("limner: ") and err.count("\n") == 1 and len(err) < 600, (arguments, err)
    assert f"{option} must be " in err or f"--{option}" in err or f"-n/--{option}" in err, (arguments, err)


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_values_of_every_command(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = 0
    for cls, option, name, count in fields(COMMANDS[command]):
        for value in wrong(cls, name):
            assert_error([*command.split(), f"--{option}", *[value] * count], option, capsys)
            tried += 1
    assert tried >= 9 and list(tmp_path.iterdir()) == []


def test_wrong_values_of_every_setting_of_a_recipe(capsys, tmp_path, monkeypatch):
    """Each with all wrong values as a file would have them, and every fifth with one on the command line."""
    monkeypatch.chdir(tmp_path)
    recipe = recipes.get("scenes")
    numbers = list(fields(Recipe, default=recipe))
    assert len(numbers) > 80
    for i, (cls, option, name, count) in enumerate(numbers):
        path = option.replace("-", "_")
        for value in (-1e9, 10**400, 1e308, "1", nan, inf, True, [[]], {}, *([1.5] if rules(cls)[name].whole else [])):
            with pytest.raises(UserError, match=f"^{path}.* must be "):
                changed(recipe, path, [value] * count if count > 1 else value)
        if i % 5 == 0:
            values = wrong(cls, name)
            given = [f"--{option}", *[values[i % len(values)]] * count]
            assert_error(["train", "data", "--out", "run", "--recipe", "scenes", *given], option, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--dvae.model.size 50", "dvae.model.size must be a multiple of the stride, 8, not 50"),
        ("--dvae.model.context-groups 5", "dvae.model.context-groups must be at most groups, 4, not 5"),
        ("--dvae.model.width 4096 --dvae.model.groups 12 --dvae.model.size 2048", "dvae.model.width"),
        ("--dvae.objective.tau.start 5e-324", "dvae.objective.tau.start must be at least 1e-06, not 5e-324"),
        ("--dvae.objective.tau.start 0", "dvae.objective.tau.start must be at least 1e-06, not 0.0"),
        ("--dvae.training.accumulate 17", "dvae.training.accumulate must be at most batch_size, 16, not 17"),
        ("--dvae.training.checkpoint-activations", "dvae.training.checkpoint-activations must be false"),
        ("--contrastive.training.checkpoint-activations", "contrastive.training.checkpoint-activations must be"),
        ("--prior.model.heads 3", "prior.model.width must be a multiple of heads, 3, not 128"),
        (
            "--prior.model.pattern rows",
            "prior.model.pattern cannot be 'rows': choose 'paper', 'row', 'column', 'conv', 'dense'",
        ),
        ("--prior.model.kernel 4", "prior.model.kernel must be odd, not 4"),
        ("--prior.model.grid 1000 1000", "prior.model.grid must have at most 65,536 positions, not 1,000,000"),
        ("--contrastive.model.heads 5", "contrastive.model.width must be a multiple of heads, 5, not 128"),
    ],
)
def test_settings_that_contradict_each_other(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "data", "--out", "run", "--recipe", "emoji", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_of_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = to_dict(recipes.get("photos"))
    for part, key, value, says in (
        ("dvae", "optimizer", {"type": "Muon"}, "dvae.training.optimizer must be AdamW"),
        ("prior", "clip_norm", nan, "prior.training.clip_norm must be a finite number, not nan"),
        ("prior", "steps", 1e9, "prior.training.steps must be an integer, not 1000000000.0"),
        ("prior", "ema_decay", 10**400, "prior.training.ema_decay must be a finite number, not inf"),
        ("prior", "steps", "9" * 5000, "prior.training.steps must be an integer, not '9999"),
    ):
        wrong = {**whole, part: {**whole[part], "training": {**whole[part]["training"], key: value}}}
        (tmp_path / "recipe.json").write_text(json.dumps(wrong))
        assert main(["train", "data", "--out", "run", "--recipe", "recipe.json"]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1 and len(err) < 300
    (tmp_path / "recipe.json").write_text('{"steps": ' + "[" * 5000)
    assert main(["train", "data", "--out", "run", "--recipe", "recipe.json"]) == 2
    assert "is not valid JSON" in capsys.readouterr().err


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Runs `limner train` without training; (exit code, the recipe that would have been trained)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, recipe: str = "scenes") -> tuple[int, Any]:
        found: list[Recipe] = []
        monkeypatch.setattr(train, "train_all", lambda settings, *others: found.append(settings))
        return main(["train", "data", "--out", "run", "--recipe", recipe, *arguments]), next(iter(found), None)

    return call


def test_an_optimizer_is_chosen_by_name(trained, capsys):
    """Its settings are then the options; those of the recipe's are unknown."""
    stable = ["--prior.training.optimizer", "StableAdamW", "--prior.training.optimizer.betas", "0.8", "0.95"]
    _, found = trained(*stable, "--contrastive.training.optimizer=Lion")
    assert found.prior.training.optimizer == StableAdamWConfig(betas=(0.8, 0.95))
    assert found.contrastive.training.optimizer == LionConfig()
    assert trained("--prior.training.optimizer", "Muon") == (0, recipes.get("scenes"))  # it is: its settings stay
    for wrong, says in (
        (["--prior.training.optimizer", "StableAdam"], "optimizer cannot be 'StableAdam': choose 'AdamW', 'Muon', "),
        (["--prior.training.optimizer", "StableAdam"], "(did you mean 'StableAdamW'?)"),
        (["--prior.training.optimizer"], "--prior.training.optimizer needs 1 value"),
        (["--prior.training.optimizer", "--prior.training.steps", "3"], "--prior.training.optimizer needs 1 value"),
        (["--dvae.training.optimizer=AdamW16"], "dvae.training.optimizer must be AdamW: AdamW16 is for the matrices"),
        (["--prior.training.optimizer=Lion", "--prior.training.optimizer.eps", "1"], "unknown: --prior.training.optim"),
    ):
        assert trained(*wrong)[0] == 2
        assert says in capsys.readouterr().err


def test_any_kind_is_chosen_by_name(trained, capsys):
    """Schedules, objectives and tokenizers change by name; a field without a default keeps the recipe's value."""
    laptop: Any = recipes.get("laptop")
    photos: Any = recipes.get("photos")
    _, found = trained("--prior.training.schedule", "Plateau", "--prior.training.schedule.halvings", "3")
    assert found.prior.training.schedule == Plateau(halvings=3)
    _, found = trained("--dvae.objective=RelaxedELB", "--dvae.objective.beta.end", "2", recipe="photos")
    assert found.dvae.objective == replace(RelaxedELB(), beta=replace(RelaxedELB().beta, end=2.0))
    assert found.dvae.training == photos.dvae.training
    convolutions = ["--dvae", "DVAEStage", "--dvae.objective", "BalancedELB", "--dvae.model.size", "48"]
    _, found = trained(*convolutions, recipe="laptop")
    assert found.dvae == DVAEStage(
        model=replace(DVAEConfig(), size=48), objective=BalancedELB(), training=laptop.dvae.training
    )
    _, found = trained("--dvae", "PretrainedDVAE", "--dvae.bundle", "icons")
    assert found.dvae == PretrainedDVAE(bundle="icons")
    for wrong, says in (
        (["--dvae.objective", "ELB", "--dvae", "DVAEStage"], "cannot be 'ELB': choose 'RelaxedELB', 'BalancedELB'"),
        (["--prior.training.scheduel", "Plateau"], "did you mean --prior.training.schedule?"),
        (["--dvae.bundle", "icons", "--dvae", "PatchStage"], "--dvae configures a new dVAE, --dvae.bundle loads"),
        (["--dvae", "Patches"], "--dvae cannot be 'Patches': choose 'DVAEStage', 'PatchStage', 'PretrainedDVAE'"),
        (["--dvae", "DVAEStage", "--dvae.training.optimizer", "Muon"], "dvae.training.optimizer must be AdamW"),
        (
            ["--prior.training.scaling", "block"],
            "scaling cannot be 'block': choose 'none', 'resblocks', 'resblocks-partial', 'loss'",
        ),
    ):
        assert trained(*wrong)[0] == 2
        assert says in capsys.readouterr().err
    assert trained("--dvae.objective", "BalancedELB", recipe="laptop")[0] == 2  # whose dVAE has one kind
    assert "unknown: --dvae.objective" in capsys.readouterr().err


def test_a_choice_by_time_is_not_deterministic(tmp_path, capsys):
    train = ["train", "nowhere", "--recipe", "tiny", "--out", str(tmp_path / "run"), "--pipeline-search"]
    assert main([*train, "--deterministic"]) == 2
    assert "--pipeline-search chooses by measured times: omit it, or --deterministic" in capsys.readouterr().err
    assert main(train) == 2
    assert "--pipeline-search need --parallel pipeline" in capsys.readouterr().err
