"""The models that come with the package: named in help and in mistakes, without torch, and small."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from limner import pretrained
from limner.cli import main
from limner.errors import UserError


@pytest.fixture
def two(tmp_path, monkeypatch):
    for name, info in {"waves": {"about": "Waves, [bold]high[/bold] ones."}, "scenes": {"about": "Things."}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"format": pretrained.FORMAT, "info": info}))
    (tmp_path / "stray").mkdir()
    monkeypatch.setattr(pretrained, "ASSETS", tmp_path)
    for module in ("limner.cli.draw", "limner.cli.edit"):  # list the models on import
        assert find_spec(module), f"{module} is renamed: its former import would stay"
        monkeypatch.setitem(sys.modules, module, sys)  # so that what is imported now goes again
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize("command", ["draw", "edit"])
def test_help_says_what_each_model_draws(two, command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    output = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "scenes: Things. waves: Waves, [bold]high[/bold] ones." in output and "stray" not in output


def test_an_unknown_name_is_answered_with_the_one_that_was_meant_or_with_all(two):
    with pytest.raises(UserError, match=r"unknown model 'x', neither .* model: choose scenes, waves$"):
        pretrained.resolve_name("x")
    with pytest.raises(UserError, match=r"a bundled model: did you mean 'waves'\?$"):
        pretrained.resolve_name("wave")


def test_a_folder_with_the_name_of_a_bundled_model_is_reported(two, tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)  # where `two` has folders of these names
    with pytest.warns(UserWarning, match=r"'waves' is the bundled model; for the folder of this name, write \./waves"):
        assert pretrained.resolve_name("waves") == tmp_path / "waves"
    recwarn.clear()
    assert str(pretrained.resolve_name("./waves")) == "waves" and pretrained.resolve_name("stray").name == "stray"
    assert not recwarn


def test_help_of_drawing_imports_no_torch():
    code = (
        "import sys, limner.cli\ntry: limner.cli.main(['draw', '--help'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "scenes: " in done.stdout and done.stdout.endswith("\nFalse\n")


def test_all_bundled_models_describe_what_they_draw_and_take_40_megabytes_at_most():
    names = pretrained.list_pretrained()
    assert pretrained.DEFAULT in names and all(names.values())
    assert sum(path.stat().st_size for path in pretrained.ASSETS.rglob("*") if path.is_file()) <= 40_000_000


def test_an_unfinished_run_is_distinguished_from_another_folder(tmp_path):
    with pytest.raises(UserError, match="is not a bundle"):
        pretrained.find_bundle(tmp_path)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(UserError, match="is incomplete: `limner train` writes its bundle when all stages are trained"):
        pretrained.find_bundle(tmp_path)
