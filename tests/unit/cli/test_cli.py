"""Help, mistakes, exit codes and warnings of all commands, in this process for speed."""

import errno
import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError

from limner import cli
from limner.bundles import read_info
from limner.cli import COMMANDS, Command, main, train
from limner.cli.arguments import parse, pop_option
from limner.cli.draw import Draw, output_path
from limner.cli.evaluate import scenes
from limner.cli.evaluate.options import ScoreComposition
from limner.distributed.gradient_reducers import Bf16Reducer
from limner.errors import UserError, escape_control
from limner.evaluation.confidence import Estimate
from limner.evaluation.result import EvalResult
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.progress import PlainProgress
from limner.quantization.precisions import Fp16Weights
from limner.sampling.generation_config import GenerationConfig
from limner.training.loop import Interrupted
from tiny import tiny_pipe


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
        (["xyzzy"], "unknown command 'xyzzy': choose demo, draw"),
        (["--versoin"], "did you mean '--version'"),
        (["draw"], "missing: CAPTION"),
        (["draw", ""], "empty"),
        (["draw", "a", "--sede", "3"], "unknown: --sede, did you mean --seed?"),
        (["draw", "--", "a", "--seed", "3"], "unknown: --seed (see"),
        (["draw", "a", "--seed", "x"], "--seed"),
        (["draw", "a", "b"], "unknown: b"),
        (["draw", "a", "-o", "b.gif"], "b.png"),
        (["draw", "a", "--model", "no-such-model"], "no-such-model"),
        (["data", "show", "x", "-o", "b.jpg"], "pictures are PNG files: use the name b.png, not b.jpg"),
        (["evaluate", "emoji", "x", "y", "--mosaic", "b.jpg"], "PNG files: use the name b.png"),
        (["evaluate", "grid", "x", "y", "-o", "b"], "PNG files: use the name b.png"),
        (["bench", "--plot", "b.xyz"], "PNG files: use the name b.png"),
        (["edit", "/dev/null", "a", "--keep-rows", "2"], "is a folder, a pipe or a device"),
        (["data"], "scenes, icons, glyphs, emoji"),
        (["data", "scene"], "did you mean 'scenes'"),
        (["data", "scenes", "out", "--count", "0"], "count"),
        (["data", "scenes", "out", "--size", "50"], "multiple of 24"),
        (["data", "scenes", "out", "--held-out", "2"], "held-out"),
        (["data", "scenes", "out", "--objects", "0", "0", "0", "0"], "objects"),
        (["data", "show", "no-such-folder"], "does not exist"),
        (["evaluate", "composition", "--objects", "5"], "objects must be at most 4, not 5"),
        (["evaluate", "emojis"], "did you mean 'emoji'"),
        (["evaluate", "pairs", "--pairs", "0"], "pairs must be at least 1"),
        (["plan", "--gpu", "v100"], "did you mean 'v100-16gb'"),
        (["plan", "--gpus", "0"], "gpus must be at least 1"),
        (["plan", "--recipe", "tiny", "--batch", "2000000"], "batch must be at most 1,048,576, not 2,000,000"),
        (["plan", "--gpus", "1000"], "a batch of 1024 cannot be divided among 1000 ranks: choose a multiple of 1000"),
        (["plan", "--dp-replicate", "3"], "1024 processes cannot hold 3 replicas: choose a divisor of 1024"),
        (["plan", "--dp-replicate", "128", "--rank", "100"], "a rank of 100 cannot be divided among 8 shards"),
        (["plan", "--link", "1e-300"], "link must be at least 0.001, not 1e-300"),
        (["plan", "--recipe", "dalle-21b"], "did you mean 'dalle-12b'"),
        (["bench", "--size", "smal"], "did you mean 'small'"),
        (["bench", "--candidates", "0"], "candidates must be at least 1, not 0"),
        (["train", "data", "--out", "run"], "--recipe"),
        (["train", "data", "--out", "run", "--recipe", "dmeo"], "did you mean 'demo'"),
        (["train", "data", "--out", "run", "--recipe", "demo", "--prior.training.step", "1"], "prior.training.steps"),
        (["train", "no-such-data", "--out", "run", "--recipe", "demo"], "does not exist"),
        (
            [
                "train",
                "data",
                "--out",
                "run",
                "--recipe",
                "demo",
                "--grad-compression",
                "bf16",
                "--grad-compression.rank",
                "8",
            ],
            "--grad-compression.rank needs --grad-compression powersgd or torch-powersgd, not bf16",
        ),
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


def test_interruptions_return_130_and_tell_how_to_resume(command, capsys):
    command(raises(Interrupted(7, Path("run/x"))))
    assert main(["act"]) == 130
    assert "same command resumes" in capsys.readouterr().err
    command(raises(KeyboardInterrupt()), resumes=True)
    assert main(["act"]) == 130
    assert "same command resumes" in capsys.readouterr().err
    command(raises(KeyboardInterrupt()))
    assert main(["act"]) == 130
    assert capsys.readouterr().err == "limner: interrupted\n"


LIBRARY = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000): pass
except KeyboardInterrupt:
    raise ImportError("the library could not be initialized")
"""


def test_an_interrupted_import_ends_the_process_with_one_sentence(tmp_path):
    """numpy and torch turn a KeyboardInterrupt during their import into errors of other kinds."""
    (tmp_path / "library.py").write_text(LIBRARY)
    code = """
import signal, sys
from limner import cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background process of a shell ignores
cli.COMMANDS["act"] = cli.Command("library", "", resumes=True)
sys.argv = ["limner", "act"]
sys.exit(cli.main())
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stderr) == (130, "limner: interrupted: the same command resumes the work\n")


def test_errors_of_files_are_sentences_and_errors_of_the_program_tracebacks(command, capsys, tmp_path):
    command(raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["act"])
    command(lambda _: (tmp_path / "gone" / "file").read_bytes())
    assert main(["act"]) == 2
    assert "gone/file: No such file" in capsys.readouterr().err


def test_a_package_that_cannot_be_imported_is_reported(command, capsys):
    command(raises(ImportError("libtorn.so: cannot open shared object file")))
    assert main(["act"]) == 2
    says = "limner: a package cannot be imported (libtorn.so: cannot open shared object file): install limner again\n"
    assert capsys.readouterr().err == says


def test_system_errors_are_one_sentence(command, capsys, tmp_path):
    def writes(path):
        def act(_):
            with open(path, "wb", buffering=0) as file:
                file.write(b"x")

        return act

    full = f'I/O error: Os {{ code: {errno.ENOSPC}, kind: StorageFull, message: "No space left on device" }}'
    for action, says in (
        (writes("/dev/full"), "No space left on device, so the write failed: free some space"),
        (raises(OSError(errno.ENOSPC, "No space left on device", "a", None, "b")), "a: No space left on device, so"),
        (raises(SafetensorError(full)), "No space left on device, so the write"),
        (raises(OSError("no reason")), "no reason"),
        (raises(TimeoutError()), "TimeoutError"),
        (raises(PermissionError(errno.EACCES, "Permission denied", b"bytes\xff")), "bytes\\udcff: Permission denied"),
        (raises(BlockingIOError(errno.EAGAIN, "Try again", 3)), "Try again"),
    ):
        command(action)
        assert main(["act"]) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"limner: {says}") and err.count("\n") == 1 and out == ""
    command(raises(SafetensorError("invalid header")))
    with pytest.raises(SafetensorError):
        main(["act"])


@pytest.mark.parametrize(
    "allocate",
    [
        lambda _: torch.empty(1 << 56),
        lambda _: torch.empty(1 << 62, 1 << 20),
        lambda _: np.empty(1 << 56),
        lambda _: bytearray(1 << 60),
        raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.")),
    ],
)
def test_memory_that_does_not_suffice_names_what_to_lower(allocate, command, capsys):
    command(allocate, oom_hint="--candidates")
    assert main(["act"]) == 2
    err = capsys.readouterr().err
    assert err.endswith("is out of memory: lower --candidates\n") and err.count("\n") == 1
    command(raises(RuntimeError("another fault")))
    with pytest.raises(RuntimeError):
        main(["act"])


STEERING = "\x1b]0;title\x07 \x9b31m \u202e \u2066 \x7f \r \n \u2028 \udc80 \ufffe"


def raw(text):
    return [c for c in text if c != "\n" and (c < " " or "\x7f" <= c < "\xa0" or c in "\u202e\u2066\u2028\udc80\ufffe")]


def test_text_from_outside_is_one_harmless_line():
    shown = escape_control(STEERING)
    assert raw(shown) == [] and "\n" not in shown
    assert r"\x1b]0;title\x07 \x9b31m \u202e \u2066 \x7f" in shown
    shown.encode()
    kept = "caf\u00e9 \u65e5\u672c \U0001f469\u200d\U0001f680 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    assert escape_control(kept) == kept
    for i in range(0x300):
        assert escape_control(escape_control(chr(i))) == escape_control(chr(i))


def test_no_command_lets_text_steer_the_terminal(command, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "warning_counts", cli.Counter())
    monkeypatch.chdir(tmp_path)
    command(raises(UserError(STEERING)))
    assert main(["act", "--debug"]) == 2
    command(lambda _: cli.show_warning(UserWarning(STEERING), UserWarning, "file.py", 1))
    assert main(["act"]) == 0
    command(lambda _: PlainProgress("t").note(STEERING))
    assert main(["act"]) == 0
    path = STEERING.replace("\udc80", "").replace("\ufffe", "")
    for arguments in (
        [path], ["draw", "a", f"--{path}"], ["draw", "a", "--model", path], ["draw", "a", "-o", f"{path}.gif"],
        ["draw", "a", "--seed", path], ["data", path], ["data", "show", path], ["data", "prepare", path, "out"],
        ["data", "emoji", "out", "--font", path], ["edit", path, "a", "--keep-rows", "1"], ["bundle", path, "out"],
        ["inspect", path], ["inspect", "precision", path],
        ["plan", "--recipe", path], ["plan", "--gpu", path], ["bench", "--size", path],
        ["train", path, "--recipe", "demo", "--out", "run"], ["train", "d", "--recipe", path, "--out", "run"],
        ["train", "d", "--recipe", f"{path}.json", "--out", "run"], ["convert", "openai-dvae", path, path, "out"],
        ["evaluate", path], ["evaluate", "composition", path], ["evaluate", "emoji", path, path],
        ["evaluate", "icons", path, path], ["evaluate", "grid", path, path, "-o", "x.png"],
        ["evaluate", "reconstruction", "--split", path],
    ):  # fmt: skip
        assert main(arguments) == 2, arguments
    out, err = capsys.readouterr()
    assert raw(out + err) == [] and err.count("limner: ") >= 24


def test_evaluations_of_data_without_a_readable_picture_raise_a_sentence(capsys, tmp_path):
    bundle, data = str(tiny_pipe().save_pretrained(tmp_path / "tiny")), tmp_path / "data"
    (data / "validation").mkdir(parents=True)
    (data / "validation/a.png").write_text("no picture")
    (data / "validation/a.txt").write_text("a caption")
    for what, options, says in (
        ("reconstruction", ["--data", str(data)], "lacks readable held-out pictures"),
        ("emoji", [str(data)], "lacks readable pictures"),
        ("zero-shot", ["--data", str(data)], "none of the 1 pictures can be read (broken image: 1)"),
        ("icons", [str(data)], "no sample has a subject and a style"),
        ("fidelity", [str(data), "--extractor", "clip"], "fidelity needs two or more readable samples"),
    ):
        assert main(["evaluate", what, bundle, *options]) == 2, what
        *_, line = capsys.readouterr().err.splitlines()
        assert says in line


@pytest.mark.parametrize("what", ["composition", "pairs", "reconstruction", "zero-shot"])
def test_a_model_whose_pictures_cannot_be_scenes_is_not_asked_for_them(capsys, what):
    assert main(["evaluate", what, "icons"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the size of scenes is a multiple of 12 pixels, this model draws 64 pixels: " in line


def test_captions_and_files_with_escape_sequences_are_shown_harmlessly(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a\x1b[2J"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "x.png")
    row = {"file": "x.png", "caption": STEERING.replace("\udc80", "")}
    (folder / "data.jsonl").write_text(json.dumps(row))
    assert main(["data", "show", str(folder / "data.jsonl"), "-o", "\x9b.png"]) == 0
    (folder / "data.jsonl").write_text(json.dumps({"file": "x.png", "caption": "a red circle"}))
    assert main(["data", "prepare", str(folder / "data.jsonl"), "o\x1bt"]) == 0
    out, err = capsys.readouterr()
    assert raw(out + err) == [] and r"\x1b]0;title" in out and r"\x9b.png" in out and r"o\x1bt" in out


def test_a_terminal_without_unicode_is_no_obstacle(tmp_path):
    (tmp_path / "\u65e5").mkdir()
    ours = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, "-m", "limner", "data", "scenes", "\u65e5/out", "--count", "1", "--pairs", "0"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, env={**os.environ, **ours})
    assert (run.returncode, b"Traceback" in run.stderr) == (0, False), run.stderr
    assert rb"\u65e5" in run.stdout


def test_warnings_are_lines_and_not_floods(command, capsys, monkeypatch):
    monkeypatch.setattr(cli, "warning_counts", cli.Counter())

    def act(_):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for i in range(10):
                cli.show_warning(UserWarning(f"number {i}"), UserWarning, "file.py", 3)

    command(act)
    assert main(["act"]) == 0
    err = capsys.readouterr().err
    assert err.splitlines() == [
        *(f"limner: warning: number {i}" for i in range(3)),
        "limner: warning: further warnings of this kind are not shown",
    ]


def test_outputs_are_named_after_the_caption(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def named(caption, seed=0, **settings):
        return output_path(Draw(caption=caption, options=GenerationConfig(seed=seed), **settings), caption)

    assert named("A red circle, & more!") == Path("a-red-circle-more.png")
    assert named("a", seed=4) == Path("a-seed-4.png")
    assert named("../../etc/passwd") == Path("etc-passwd.png")
    assert named("?!") == Path("drawing.png")
    assert len(named("word " * 100).name) < 100
    for folder in (str(tmp_path), ".", "./", "..", "new/", "new/folder/"):
        assert named("a", output=folder) == Path(folder) / "a.png"
    assert named("a", output="x") == Path("x.png")
    for character in ("\u65e5", "\U0001d4d0", "e\u0301", "\udc80"):
        longest = named(character * 300, seed=2**63 - 1, n=2, output="new/")
        assert len(longest.name.encode()) < 200 and not longest.parent.exists()


def test_the_last_value_of_a_repeated_option_counts():
    assert parse(Draw, ["a", "-n", "2", "-n", "3"], "limner draw").n == 3
    assert parse(ScoreComposition, ["--objects", "1", "2", "--objects", "3"], "limner").objects == (3,)
    assert pop_option("--recipe", ["--recipe", "scenes", "data", "--recipe=laptop"]) == ("laptop", ["data"])


def test_a_mosaic_that_cannot_be_written_keeps_the_table(monkeypatch, capsys, tmp_path):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    result = EvalResult(title="captions", rows={"best of 2": {"right": Estimate(value=0.5)}})
    monkeypatch.setattr(scenes, "_load_scene_model", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(scenes, "_score", lambda *_: [result])
    monkeypatch.setattr("limner.evaluation.report.contact_sheet", lambda *_, **__: None)
    monkeypatch.setattr("limner.evaluation.report.save_png", fails)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "composition", "--captions", "1", "--mosaic", "drawn.png"]) == 2
    out, err = capsys.readouterr()
    assert "best of 2" in out and "No space left on device" in err


OUTPUTS = {
    "file": (
        "evaluate composition -o", "evaluate composition --mosaic", "evaluate pairs -o", "evaluate reconstruction -o",
        "evaluate zero-shot -o", "evaluate fidelity run data -o", "evaluate fidelity run data --page",
        "evaluate all -o", "evaluate all --page",
        "evaluate emoji run data -o", "evaluate emoji run data --mosaic", "evaluate icons run data -o",
        "evaluate glyphs run data --mosaic", "evaluate grid run data -o", "inspect spikes run -o", "bench -o",
        "data show source -o", "draw a -o", "draw a -n 2 -o",
    ),
    "folder": (
        "data scenes", "data emoji", "data prepare source", "evaluate icons run data --classifier", "demo --out",
        "train source --recipe scenes --out", "bundle scenes", "convert openai-dvae encoder decoder",
    ),
}  # fmt: skip
NOWHERE = ("file/x.png", "file/new/x.png", "\u65e5" * 80 + ".png", "x" * 250 + ".png", "\u65e5" * 90 + "/x.png",
    "new/" * 1100 + "x.png", "loop/x.png", "zero\0.png")  # fmt: skip


@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_unwritable_output_is_reported_before_the_work(kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder-2.png").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    wrong = {"file": ("", "."), "folder": ("file", "/dev/null", "loop", "x" * 240)}[kind]
    for command in OUTPUTS[kind]:
        mine = ("folder.png", "/dev/full") if "draw" not in command else ("folder", "")
        for place in (*NOWHERE, *(wrong if "draw" not in command else ()), *(mine if kind == "file" else ())):
            assert main([*command.split(), place]) == 2, (command, place)
            out, err = capsys.readouterr()
            assert out == "" and err.startswith("limner: ") and err.count("\n") == 1 and len(err) < 200, (command, err)
            assert "does not exist" not in err and "no model" not in err, (command, place)  # that comes after
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


def test_a_scale_that_no_picture_can_have_is_reported_before_drawing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "a", "--scale", "400"]) == 2
    assert capsys.readouterr().err.startswith("limner: scale 400 would give a picture of 19200 pixels per side")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_folders_without_permission_are_reported_before_the_work(capsys, tmp_path):
    tmp_path.chmod(0o500)
    assert main(["draw", "a", "-o", f"{tmp_path}/a.png"]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_scores_join_those_of_the_model_if_they_can(capsys, tmp_path):
    scores = {"title": "all", "rows": {"any": {"right": 1}}, "settings": {}}
    (tmp_path / "new.json").write_text(json.dumps({"results": [{**scores, "cases": [1]}]}))
    pipe = tiny_pipe()
    for before, code in (({"old": 2}, 0), (0.9, 2), (None, 0)):
        pipe.info["scores"] = before
        source = pipe.save_pretrained(tmp_path / "source")
        assert main(["bundle", str(source), str(tmp_path / "out"), "--scores", str(tmp_path / "new.json")]) == code
        if code == 0:
            assert read_info(tmp_path / "out")["scores"] == {**(before or {}), "new": [scores]}
    assert "scores in config.json must be a JSON object" in capsys.readouterr().err


def test_recipe_settings_can_be_overridden_and_wrong_files_are_refused(tmp_path, monkeypatch):
    from limner.cli import train
    from limner.config import save_json

    seen = []
    monkeypatch.setattr(train, "train_all", lambda *arguments: seen.append(arguments))
    out = tmp_path / "run"
    arguments = ["train", "data", "--out", str(out), "--recipe", "demo", "--prior.training.steps", "7"]
    assert main([*arguments, "--stages", "prior", "--prior.training.precision", "bf16"]) == 0
    ((recipe, data, folder, stages, *_),) = seen
    assert (recipe.prior.training.steps, data, folder, stages) == (7, "data", out, ("prior",))
    assert (recipe.prior.training.precision, recipe.contrastive.training.precision) == (Bf16(), Auto())
    assert main([*arguments, "--prior.training.precision", "fp8"]) == 2
    out.mkdir()
    save_json(recipe, out / "recipe.json")
    assert main(["train", "data", "--out", str(out), "--recipe", str(out / "recipe.json")]) == 0
    assert seen[1][0] == recipe
    assert seen[1][3] is None


def test_the_command_line_overrides_the_recipes_compression(tmp_path, monkeypatch):
    ranks, reducers = [], []

    @contextmanager
    def join(kind, replicas, make_reducer, *pipeline):
        reducers.append(make_reducer)
        yield None

    monkeypatch.setattr(train, "train_all", lambda recipe, *_: ranks.append(recipe.prior.grad_compression_rank))
    monkeypatch.setattr(train.process_group, "join_process_group", join)
    for words in (
        [],
        ["--prior.grad-compression-rank", "8"],
        ["--grad-compression", "none"],
        ["--grad-compression=bf16"],
    ):
        assert main(["train", "data", "--out", str(tmp_path / "run"), "--recipe", "dalle-12b", *words]) == 0
    assert ranks == [896, 8, None, None] and reducers == [None, None, None, Bf16Reducer]


def test_plan_prints_the_papers_tables_without_a_gpu(capsys):
    assert main(["plan", "--gpus", "1024", "--gpu", "v100-16gb", "--batch", "1024"]) == 0
    out = capsys.readouterr().out
    for text in ("12,092,178,432", "2,444,288", "85.9%", "Table 1", "3,968   896    86%", "fits", "h200-141gb"):
        assert text in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("8 stages x 128")]
    assert row[4:6] == ["8", "47%"]  # micro-batches, bubble: 7 / 15


def test_plan_says_which_of_its_columns_can_be_run_today(capsys):
    assert main(["plan", "--recipe", "tiny", "--gpus", "1"]) == 0
    assert "no pipelines: a pipeline takes at least two GPUs" in capsys.readouterr().out
    assert main(["plan", "--recipe", "tiny", "--gpus", "16"]) == 0
    *tables, output = capsys.readouterr().out.split("\n\n")
    words = ("--parallel fsdp", '"fp32"', "PowerSGD", "checkpointed", "AdamW16", "fp16weights", '"16-bit (App. D)"')
    assert all(text in output for text in words) and "Not yet" not in output
    heads = next(table for table in tables if table.startswith("memory per GPU")).splitlines()[0].split("  ")
    heads = [head.strip() for head in heads if head.strip()]
    assert heads[1:] == ["fp32", "checkpointed", "16-bit (App. D)", "checkpointed"]  # which the sentence speaks of


def test_plan_proposes_a_launch_whose_command_is_one(capsys):
    asked = ["plan", "--recipe", "tiny", "--gpus", "16", "--batch", "64", "--link", "1000"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "1,000 Mbit/s" in out
    line = out.partition("the fastest that fits:\n\n")[2].partition("\n\n")[0].replace("\\\n", " ")
    torchrun, _, words = line.partition(" -m ")
    assert torchrun.startswith("torchrun --nnodes 2 --nproc-per-node 8 ")
    reduction = " --grad-compression powersgd --grad-compression.rank 128"
    assert reduction in words
    options = parse_train(words.replace(reduction, "").split()[2:])
    assert (options.parallel, options.dp_replicate, options.stages) == ("fsdp", 2, ("prior",))
    assert options.settings.prior.training.batch_size == 64
    assert not options.settings.prior.training.checkpoint_activations  # which the recipe does, and is not needed here


@pytest.mark.parametrize(
    ("recipe", "gpu", "precision", "scaling"),
    [
        ("tiny", "v100-16gb", Fp16(), "resblocks"),
        ("tiny", "a100-80gb", Auto(), "none"),
        ("dalle-3b", "a100-80gb", Fp16Weights(), "resblocks"),
    ],
)
def test_plan_proposes_products_that_the_gpu_has(recipe, gpu, precision, scaling, capsys):
    assert main(["plan", "--recipe", recipe, "--gpus", "8", "--gpu", gpu]) == 0
    line = capsys.readouterr().out.partition("the fastest that fits:\n\n")[2].partition("\n\n")[0]
    words = line.replace("\\\n", " ").split()
    training = parse_train(words[words.index("train") + 1 :]).settings.prior.training
    assert (training.precision, training.scaling) == (precision, scaling)


def test_replicas_are_a_number_or_one_per_node():
    asked = ["DATA", "--recipe", "scenes", "--out", "RUN", "--dp-replicate"]
    assert [parse_train([*asked, word]).dp_replicate for word in ("per-node", "4")] == ["per-node", 4]
    for word in ("0", "node"):
        with pytest.raises(UserError, match="dp.replicate"):
            parse_train([*asked, word])


def parse_train(words):
    """Options of `limner train`."""
    settings = train.find_recipe(words[words.index("--recipe") + 1])
    default = train.Train(data="", out=Path(), recipe="", settings=settings)
    return parse(train.Train, words, "limner train", default)


def test_plan_says_why_nothing_fits(capsys):
    assert main(["plan", "--gpus", "8", "--gpu", "v100-16gb"]) == 0
    assert "no launch fits" in (out := capsys.readouterr().out) and "the smallest takes" in out


def test_plan_tries_a_launch(capsys):
    asked = ["plan", "--recipe", "tiny", "--gpus", "12", "--dp-replicate", "1", "--batch", "12", "--gpu", "h100-80gb"]
    assert main([*asked, "--per-machine", "4", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "rank 0 of 12, uncompressed" in out and "12 shards do not divide 23 of these evenly" in out
    weights = next(line for line in out.splitlines() if line.startswith("weights, MB"))
    assert weights.split()[-2] == weights.split()[-1]


@pytest.mark.slow
def test_bench_times_both_sides_and_draws_the_cost(capsys, tmp_path):
    plot = tmp_path / "cost.png"
    sizes = ["--size", "tiny", "--grids", "2", "4", "--candidates", "1", "3", "--batch", "1", "--rounds", "1"]
    assert main(["bench", *sizes, "-o", str(plot)]) == 0
    output = capsys.readouterr().out
    assert output.count("sparse is") == 4  # in each grid's table and its line on training
    assert [line.split()[:2] for line in output.splitlines() if line[:1].isdecimal()] == 2 * [
        ["1", "sparse"], ["1", "dense"], ["3", "sparse"], ["3", "dense"],
    ]  # fmt: skip
    with Image.open(plot) as picture:
        assert picture.format == "PNG"
