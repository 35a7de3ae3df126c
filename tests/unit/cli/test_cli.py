"""What all commands have in common: help, mistakes, exit codes, warnings. In this process, for speed."""

import sys
import warnings
from pathlib import Path

import pytest
from PIL import Image

from limner import cli
from limner.cli import COMMANDS, Command, main
from limner.cli.arguments import one_sentence
from limner.cli.draw import Draw, output_path
from limner.errors import UserError
from limner.training.loop import Interrupted


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and command.help in out for name, command in COMMANDS.items())
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["drwa"], "did you mean 'draw'"),
        (["xyzzy"], "there are demo, draw"),
        (["--versoin"], "did you mean '--version'"),
        (["draw"], "missing: CAPTION"),
        (["draw", ""], "empty"),
        (["draw", "a", "--sede", "3"], "did you mean --seed"),
        (["draw", "a", "--seed", "x"], "--seed"),
        (["draw", "a", "b"], "unknown: b"),
        (["draw", "a", "-o", "b.gif"], "b.png"),
        (["draw", "a", "--model", "no-such-model"], "no-such-model"),
        (["data"], "scenes, emoji"),
        (["data", "scene"], "did you mean 'scenes'"),
        (["data", "scenes", "out", "--count", "0"], "count"),
        (["data", "scenes", "out", "--size", "50"], "multiple of 24"),
        (["data", "scenes", "out", "--held-out", "2"], "held-out"),
        (["data", "scenes", "out", "--things", "0", "0", "0", "0"], "things"),
        (["data", "show", "no-such-folder"], "does not exist"),
        (["evaluate", "composition", "--things", "5"], "things must be at most 4, not 5"),
        (["evaluate", "emojis"], "did you mean 'emoji'"),
        (["evaluate", "pairs", "--pairs", "0"], "pairs must be at least 1"),
        (["plan", "--gpu", "v100"], "did you mean 'v100-16gb'"),
        (["plan", "--gpus", "0"], "gpus must be at least 1"),
        (["plan", "--recipe", "dalle-21b"], "did you mean 'dalle-12b'"),
        (["bench", "--size", "smal"], "did you mean 'small'"),
        (["bench", "--candidates", "0"], "candidates must be at least 1, not 0"),
        (["train", "data", "--out", "run"], "--recipe"),
        (["train", "data", "--out", "run", "--recipe", "dmeo"], "did you mean 'demo'"),
        (["train", "data", "--out", "run", "--recipe", "demo", "--prior.training.step", "1"], "prior.training.steps"),
        (["train", "no-such-data", "--out", "run", "--recipe", "demo"], "does not exist"),
        (["bundle", "no-such-model", "out"], "no-such-model"),
        (["demo", "--captions", "0"], "captions must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert last.startswith("limner: ")
    assert says in last
    assert "Traceback" not in err
    assert "╭" not in out + err


@pytest.fixture
def command(monkeypatch):
    """Makes `limner act` raise or return what a test wants."""

    def set_up(action, **options):
        module = type(sys)("limner_act")
        module.main = action
        monkeypatch.setitem(sys.modules, "limner_act", module)
        monkeypatch.setitem(COMMANDS, "act", Command("limner_act", "", **options))

    return set_up


def raises(error):
    def action(_):
        raise error

    return action


def test_debug_shows_the_traceback(command, capsys):
    command(raises(UserError("a sentence")))
    assert main(["act"]) == 2
    assert capsys.readouterr().err == "limner: a sentence\n"
    for arguments in (["act", "--debug"], ["--debug", "act"]):
        assert main(arguments) == 2
        assert "Traceback" in capsys.readouterr().err
    command(lambda arguments: 0 if arguments == ["--", "--debug"] else 1)
    assert main(["act", "--", "--debug"]) == 0


def test_interruptions_are_130_and_say_how_to_go_on(command, capsys):
    command(raises(Interrupted(7, Path("run/x"))))
    assert main(["act"]) == 130
    assert "same command goes on" in capsys.readouterr().err
    command(raises(KeyboardInterrupt()), resumes=True)
    assert main(["act"]) == 130
    assert "same command goes on" in capsys.readouterr().err
    command(raises(KeyboardInterrupt()))
    assert main(["act"]) == 130
    assert capsys.readouterr().err == "limner: interrupted\n"


def test_faults_of_the_program_are_not_hidden_but_those_of_files_are_told(command, capsys, tmp_path):
    command(raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["act"])
    command(lambda _: (tmp_path / "gone" / "file").read_bytes())
    assert main(["act"]) == 2
    assert "gone/file: No such file" in capsys.readouterr().err


def test_warnings_are_lines_and_not_floods(command, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_shown", cli.Counter())

    def act(_):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for i in range(10):
                cli._show_warning(UserWarning(f"number {i}"), UserWarning, "file.py", 3)

    command(act)
    assert main(["act"]) == 0
    err = capsys.readouterr().err
    assert err.splitlines() == [
        *(f"limner: warning: number {i}" for i in range(3)),
        "limner: warning: and more of this kind",
    ]


def test_outputs_are_named_after_the_caption(tmp_path):
    assert output_path(Draw(caption="A red circle, & more!"), "A red circle, & more!") == Path("a-red-circle-more.png")
    assert output_path(Draw(caption="a", seed=4), "a") == Path("a-seed-4.png")
    assert output_path(Draw(caption="../../etc/passwd"), "../../etc/passwd") == Path("etc-passwd.png")
    assert output_path(Draw(caption="?!"), "?!") == Path("drawing.png")
    assert len(output_path(Draw(caption="word " * 100), "word " * 100).name) < 100
    assert output_path(Draw(caption="a", output=tmp_path), "a") == tmp_path / "a.png"
    assert output_path(Draw(caption="a", output=Path("x")), "a") == Path("x.png")


FRAMED = """╭─ Unrecognized options ───╮
│ Unrecognized options: -x │
│ ──────────────────────── │
│ Perhaps you meant:       │
│     -n INT, --n INT      │
╰──────────────────────────╯"""
PLAIN = """ Unrecognized options
 ------------------------
 Unrecognized options: -x
 ------------------------
 Perhaps you meant:
     -n INT, --n INT
"""


@pytest.mark.parametrize("box", [FRAMED, PLAIN])
def test_complaints_become_a_sentence_with_and_without_a_frame(box):
    assert one_sentence(box) == "unknown: -x, did you mean -n?"
    assert one_sentence("") == "the arguments cannot be read"


def test_recipe_settings_can_be_overridden_and_wrong_files_are_refused(tmp_path, monkeypatch):
    from limner.cli import train
    from limner.config import save_json

    seen = []
    monkeypatch.setattr(train.stages, "train_all", lambda *arguments: seen.append(arguments))
    out = tmp_path / "run"
    arguments = ["train", "data", "--out", str(out), "--recipe", "demo", "--prior.training.steps", "7"]
    assert main([*arguments, "--stages", "prior"]) == 0
    ((recipe, data, folder, stages),) = seen
    assert (recipe.prior.training.steps, data, folder, stages) == (7, "data", out, ("prior",))
    out.mkdir()
    save_json(recipe, out / "recipe.json")
    assert main(["train", "data", "--out", str(out), "--recipe", str(out / "recipe.json")]) == 0
    assert seen[1][0] == recipe
    assert seen[1][3] is None


def test_plan_prints_the_papers_tables_without_a_gpu(capsys):
    assert main(["plan", "--gpus", "1024", "--gpu", "v100-16gb", "--batch", "1024"]) == 0
    out = capsys.readouterr().out
    for text in ("12,092,178,432", "2,444,288", "85.9%", "Table 1", "3,968   896    86%", "fits", "h200-141gb"):
        assert text in out


def test_plan_says_which_of_its_columns_can_be_run_today(capsys):
    assert main(["plan", "--recipe", "tiny", "--gpus", "16"]) == 0
    *tables, said = capsys.readouterr().out.split("\n\n")
    today, later = said.split("Not yet:")
    assert all(text in today for text in ("one device", "fp32", "bf16 autocast", "checkpointed"))
    assert all(text in later for text in ('"16-bit (App. D)"', "sharded", "averaged between machines", "PowerSGD"))
    heads = next(table for table in tables if table.startswith("memory a GPU")).splitlines()[0].split("  ")
    heads = [head.strip() for head in heads if head.strip()]
    assert heads[1:] == ["fp32", "checkpointed", "16-bit (App. D)", "checkpointed"]  # which the sentence speaks of


def test_bench_times_both_sides_and_draws_the_cost(capsys, tmp_path):
    plot = tmp_path / "cost.png"
    sizes = ["--size", "tiny", "--grids", "2", "4", "--candidates", "1", "3", "--batch", "1", "--rounds", "1"]
    assert main(["bench", *sizes, "-o", str(plot)]) == 0
    said = capsys.readouterr().out
    assert said.count("sparse is") == 4  # in each grid's table and its line on training
    assert [line.split()[:2] for line in said.splitlines() if line.startswith("     ")] == 2 * [
        ["1", "sparse"], ["1", "dense"], ["3", "sparse"], ["3", "dense"],
    ]  # fmt: skip
    with Image.open(plot) as picture:
        assert picture.format == "PNG"
