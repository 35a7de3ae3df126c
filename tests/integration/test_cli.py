"""The commands as a user runs them: real processes, exit codes, files."""

import io
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from icon_sets import SQUARE, archive, information
from limner.cli.malloc_tuning import TUNABLES
from limner.data.open_source import open_source
from limner.data.shard_writer import ShardWriter
from tiny import tiny_pipe
from toy_icons import write_toy_icons

SOURCE = Path(__file__).parents[2] / "src"
CAPTION = "a small red circle above a large blue square on a gray background"


def start(*arguments, cwd=None, code=None, **options):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "limner"] if code is None else [sys.executable, "-c", code]
    return subprocess.Popen(
        [*command, *map(str, arguments)], cwd=cwd, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def limner(*arguments, **options):
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_pipe().save_pretrained(tmp_path_factory.mktemp("models") / "tiny")


def test_help_answers_within_half_a_second_and_imports_nothing_heavy():
    """Seconds of processor time, so that a busy machine does not fail it."""
    limner("--help")  # compiles
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, out, _ = limner("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 0
    assert "draw a caption" in out
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    code, out, _ = limner(
        code="import sys, limner.cli; limner.cli.main(['--help']); limner.cli.main(['--version']);"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'PIL', 'tyro', 'rich'}))"
    )
    assert out.splitlines()[-1] == "[]"


def test_import_limner_is_light():
    code, out, _ = limner(code="import sys, limner; print(limner.__version__, 'torch' in sys.modules)")
    assert code == 0
    assert out.split()[1] == "False"


def test_draw_writes_the_same_picture_for_the_same_seed(bundle, tmp_path):
    options = ["--model", bundle, "--candidates", 4]
    code, out, err = limner("draw", CAPTION, *options, cwd=tmp_path)
    assert code == 0, err
    name, number = re.fullmatch(r"(.+)  \(score \S+, candidate (\d) of 4\)\n", out).groups()
    assert name == CAPTION.replace(" ", "-") + ".png"
    assert limner("draw", CAPTION, *options, "-n", 2, "-o", "again.png", "--scale", 1, cwd=tmp_path)[0] == 0
    first, again = (Image.open(tmp_path / name) for name in (name, "again-1.png"))
    assert first.text["candidate"] == number
    assert first.text["caption"] == again.text["caption"] == CAPTION
    assert "trainedAlgorithmicMedia" in first.text["XML:com.adobe.xmp"]
    assert np.array_equal(np.asarray(first)[::16, ::16], np.asarray(again))
    assert (tmp_path / "again-2.png").exists()


def test_edit_draws_below_what_is_kept_and_under_a_mask(bundle, tmp_path):
    options = ["--model", bundle, "--candidates", 2, "--scale", 1]
    assert limner("draw", CAPTION, *options, "-o", "first.png", cwd=tmp_path)[0] == 0
    Image.new("L", (24, 24), 255).save(tmp_path / "mask.png")
    (tmp_path / "text.png").write_text("no picture")
    default = CAPTION.replace(" ", "-") + "-edited.png"  # not the name of the drawing that it may have come from
    for says, name in (["--keep-rows", "3"], default), (["--mask", "mask.png", "-o", "second.png"], "second.png"):
        code, out, err = limner("edit", "first.png", CAPTION, *says, *options, cwd=tmp_path)
        assert code == 0, err
        assert out.startswith(name + " ")
        assert Image.open(tmp_path / name).text["caption"] == CAPTION
    for wrong in (
        ["first.png", CAPTION], ["first.png", CAPTION, "--keep-rows", "0"], ["text.png", CAPTION, "--keep-rows", "2"],
        ["none.png", CAPTION, "--keep-rows", "2"], ["first.png", CAPTION, "--keep-rows", "2", "--mask", "mask.png"],
    ):  # fmt: skip
        code, out, err = limner("edit", *wrong, *options, cwd=tmp_path)
        assert (code, out, err.count("\n")) == (2, "", 1), err


def test_mistakes_are_one_sentence_and_code_2(bundle, tmp_path):
    for arguments, says in (
        (["drwa"], "did you mean 'draw'"),
        (["draw", " "], "empty"),
        (["draw", CAPTION, "--model", bundle, "--top-p", "3"], "top-p"),
        (["draw", CAPTION, "--model", tmp_path], "not a bundle"),
    ):
        code, out, err = limner(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("limner: ")
        assert err.count("\n") == 1
        assert says in err
    code, _, err = limner("draw", " ", "--debug")
    assert code == 2
    assert "Traceback" in err


@pytest.mark.parametrize("words", [["--help"], ["draw", "--help"]])
def test_a_reader_that_goes_away_is_no_error(words, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # so that Python has what it could not write when it ends
    code, _, err = limner(
        *words,
        code="import os, sys, limner.cli; r, w = os.pipe(); os.close(r); os.dup2(w, 1);"
        "sys.exit(limner.cli.main(sys.argv[1:]))",
    )
    assert (code, err) == (0, "")


def test_output_that_cannot_be_written_is_a_sentence_and_closed_streams_are_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    for words, closed, code, says in (
        (["--version"], "exec >/dev/full", 2, "limner: No space left on device, so"),
        (["--version"], "exec >&-", 0, ""),
        (["data", "scenes", "out", "--count", "1", "--pairs", "0"], "exec >&- 2>&-", 0, ""),
        (["drwa"], "exec >&- 2>&-", 2, ""),
    ):
        command = ["sh", "-c", f'{closed}; exec "$0" -m limner "$@"', sys.executable, *words]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (code, "", bool(says)), run.stderr
        assert run.stderr.startswith(says)
    assert (tmp_path / "out").is_dir()


RESTARTS = """
import os, sys
from limner.cli.malloc_tuning import restart_with_malloc_tunables
restart_with_malloc_tunables()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_heavy_commands_start_again_once_with_the_allocator_set(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert limner("a b", "--c", code=RESTARTS)[1] == f"{TUNABLES} ['a b', '--c']\n"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert limner(code=RESTARTS)[1] == "glibc.malloc.check=0 []\n"


def test_data_from_scenes_to_shards(tmp_path):
    code, out, err = limner("data", "scenes", "world", "--count", 12, "--seed", 3, cwd=tmp_path)
    assert code == 0, err
    assert "kept  12" in out
    assert "train" in out
    assert limner("data", "scenes", "twin", "--count", 12, "--seed", 3, cwd=tmp_path)[0] == 0
    assert (tmp_path / "world" / "00000.tar").read_bytes() == (tmp_path / "twin" / "00000.tar").read_bytes()
    assert limner("data", "scenes", "world", "--count", 5, cwd=tmp_path)[0] == 2
    code, out, err = limner("data", "show", "world", "--captions", 2, "-o", "sheet.png", cwd=tmp_path)
    assert code == 0, err
    assert "kept  12" in out
    assert (tmp_path / "sheet.png").exists()


def test_data_from_icon_sets_to_shards(tmp_path):
    icons = {"tiger": {"body": SQUARE}, "guitar": {"body": f"<g>{SQUARE}</g>"}, "bad": {"body": "<script/>"}}
    for prefix, spdx in (("twemoji", "CC-BY-4.0"), ("noto", "Apache-2.0"), ("openmoji", "CC-BY-SA-4.0")):
        archive(tmp_path / f"{prefix}.tgz", icons={"prefix": prefix, "icons": icons}, info=information(spdx))
    cldr = {"annotations": {"annotations": {"\U0001f405": {"default": ["big cat", "tiger"], "tts": ["tiger"]}}}}
    words = archive(tmp_path / "cldr.tgz", annotations__en__annotations=cldr)
    sets = ["twemoji.tgz", "noto.tgz", "openmoji.tgz", words]
    code, out, err = limner("data", "icons", "made", *sets, "--pairs", 0, cwd=tmp_path)
    assert code == 0, err
    assert "Toys, by A. Painter (CC-BY-4.0): 3 drawings" in out
    assert "license is CC-BY-SA-4.0: --all-licenses includes it" in out
    assert re.search(r"^kept +4 ", out, re.M)
    assert re.search(r"SVG with an element that icons do not need: script +2 ", out)
    source = open_source(str(tmp_path / "made"))
    assert len(source) == 4
    assert "big cat, flat" in source[0].captions
    assert {source.meta(i)["style"] for i in range(4)} == {"flat", "shaded"}
    code, out, err = limner("data", "icons", "more", *sets, "--all-licenses", "--pairs", 0, cwd=tmp_path)
    assert code == 0, err
    more = open_source(str(tmp_path / "more"))
    assert [more.meta(i)["style"] for i in range(len(more))] == ["flat", "flat", "shaded", "shaded", "comic", "comic"]
    for wrong, says in (
        (["none.tgz"], "none.tgz"),
        ([words, "openmoji.tgz"], "no icon set has a permissive license"),
        (["twemoji.tgz", "--background", "no such color"], "background must be a CSS color"),
        (["twemoji.tgz", "--size", 33], "must be even"),
        (["twemoji.tgz", "--margin", 17], "must be at most a quarter of size, 16, not 17"),
        ([], "files"),
    ):
        code, out, err = limner("data", "icons", "wrong", *wrong, cwd=tmp_path)
        assert code == 2, out
        assert says in err
        assert err.count("limner:") == 1 and "Traceback" not in err


SCORED = ["--captions", 3, "--candidates", 2]
EVALUATIONS = {
    "composition": ([*SCORED, "--objects", 1, "--mosaic", "drawn.png"], "written: drawn.png"),
    "pairs": (["--pairs", 3, "--candidates", 2], "best of 2"),
    "reconstruction": (["--count", 4], "4 unseen pictures"),
    "all": ([*SCORED, "--page", "all.html"], "\nzero-shot\n"),
}


@pytest.mark.parametrize("kind", [*list(EVALUATIONS)[:3], pytest.param("all", marks=pytest.mark.slow)])
def test_evaluate_prints_a_table_and_writes_its_numbers_for_the_bundles_card(kind, bundle, tmp_path):
    options, says = EVALUATIONS[kind]
    code, out, err = limner("evaluate", kind, bundle, *options, "-o", "scores.json", cwd=tmp_path)
    assert code == 0, err
    assert says in out
    assert out.endswith("written: scores.json\n")
    found = json.loads((tmp_path / "scores.json").read_text())
    if kind == "reconstruction":
        assert found["results"][0]["rows"]["PSNR"]["value"]["value"] > 0
        assert "12 single objects" in out
    else:
        number = found["results"][0]["rows"]["any candidate"]["right"]["total"]
        assert number == 3
    if kind == "all":
        page = (tmp_path / "all.html").read_text()
        drawings, reconstructions = 3 + 1, 3 + 9  # each next to its original
        assert page.count("<h2>") == 5 and page.count("data:image/png") == 2 * (drawings + reconstructions)
    if kind == "composition":
        assert Image.open(tmp_path / "drawn.png").width > 3 * 2 * 144  # a drawing and a real scene of each
    code, out, err = limner("bundle", bundle, "packed", "--about", "Tiny.", "--scores", "scores.json", cwd=tmp_path)
    assert code == 0, err
    assert re.fullmatch(r"packed: packed, \d\.\d MB\n", out)
    card = (tmp_path / "packed" / "README.md").read_text()
    assert "Tiny." in card
    assert "scores" in card
    code, _, err = limner("bundle", bundle, "small", "--bits", 8, cwd=tmp_path)
    assert code == 0, err
    sizes = [(tmp_path / name / "prior.safetensors").stat().st_size for name in ("small", "packed")]
    assert sizes[0] < 0.8 * sizes[1]


def test_evaluate_reads_held_out_data_and_emoji(bundle, tmp_path):
    with ShardWriter(tmp_path / "data") as writer:
        for i in range(8):
            file = io.BytesIO()
            Image.new("RGB", (24, 24), (30 * i, 255 - 30 * i, 90)).save(file, "PNG")
            meta = {"emoji": chr(0x1F600 + i), "family": f"family {i // 2}", "split": "held-out" if i < 2 else "train"}
            writer.write(file.getvalue(), [f"a face of kind {i}"], meta)
    code, out, err = limner("evaluate", "reconstruction", bundle, "--data", "data", "-o", "scores.json", cwd=tmp_path)
    assert code == 0, err
    assert "2 unseen pictures" in out
    assert "same scene" not in json.loads((tmp_path / "scores.json").read_text())["results"][0]["rows"]
    options = ["--candidates", 2, "--repeats", 2, "-o", "emoji.json", "--mosaic", "mosaic.png"]
    found = limner("evaluate", "zero-shot", bundle, "--data", "data", "-o", "classes.json", cwd=tmp_path)
    assert found[0] == 0, found[2]
    assert "classes, 2 prompts each" in found[1] and "top 1" in found[1]
    assert json.loads((tmp_path / "classes.json").read_text())["results"][0]["rows"]["top 1"]["accuracy"]["total"] > 0
    code, out, err = limner("evaluate", "emoji", bundle, "data", *options, cwd=tmp_path)
    assert code == 0, err
    assert "train" in out
    assert "held-out" in out
    assert (tmp_path / "emoji.json").stat().st_size
    assert Image.open(tmp_path / "mosaic-train.png").size > Image.open(tmp_path / "mosaic-held-out.png").size


@pytest.mark.slow
def test_evaluate_icons_saves_its_classifier_and_a_grid_is_a_picture(bundle, tmp_path):
    write_toy_icons(tmp_path / "icons")
    options = ["--captions", 2, "--candidates", 2, "--classifier-steps", 2, "-o", "icons.json", "--mosaic", "m.png"]
    first = limner("evaluate", "icons", bundle, "icons", *options, cwd=tmp_path)
    assert first[0] == 0, first[2]
    for says in ("classifier accuracy on its 20 training pictures", "held-out combinations, 1 captions of 1 subjects",
        "held-out subjects", "training captions", "held-out pairs, style", "held-out pairs, upside down"):  # fmt: skip
        assert says in first[1]
    names = [part["title"] for part in json.loads((tmp_path / "icons.json").read_text())["results"]]
    assert len(names) == 5
    for split in ("combination", "subject", "train"):
        assert Image.open(tmp_path / f"m-{split}.png").width >= 2 * 144
    classifiers = sorted((tmp_path / "icons-classifier").rglob("*.safetensors"))
    assert classifiers
    again = limner("evaluate", "icons", bundle, "icons", *options, "--classifier", "icons-classifier", cwd=tmp_path)
    assert again[:2] == first[:2]
    assert sorted((tmp_path / "icons-classifier").rglob("*.safetensors")) == classifiers
    asked = ["--subjects", "circle", "cross", "--candidates", 2, "--real", "-o", "grid.png"]
    code, out, err = limner("evaluate", "grid", bundle, "icons", *asked, cwd=tmp_path)
    assert (code, out) == (0, "written: grid.png\n"), err
    width, height = Image.open(tmp_path / "grid.png").size
    assert width > 4 * 2 * 96 and 2 * 96 < height < 3 * 96


def test_plan_says_which_of_its_figures_run():
    code, out, err = limner("plan", "--recipe", "dalle-12b", "--gpus", 1024, "--gpu", "v100-16gb", "--batch", 1024)
    assert code == 0, err
    assert "fp16weights, the default from dalle-3b on" in out
    assert "12.09" in out or "12,09" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--gpus", 2, "--gpu", "a100-80gb"], r"--pipeline-stages 2, each GPU holds .*:\na step takes \d\.\d\d times"),
        (["--gpus", 2, "--gpu", "v100-16gb"], "scales gradients, which a pipeline"),  # fp16 without bf16
        (["--gpus", 1, "--gpu", "a100-80gb"], "no pipelines"),
    ],
)
def test_plan_names_pipelines_where_one_can_run(options, says):
    code, out, err = limner("plan", "--recipe", "laptop", *options)
    assert code == 0, err
    assert re.search(says, out)
    assert ("--parallel pipeline" in out) == (options[1] == 2)


TINY_DEMO = """
import sys
from dataclasses import replace
from limner.cli import demo
from limner.recipes import presets
def small(stage, **model):
    training = {"steps": 30, "batch_size": 4, "warmup_steps": 2, "log_every": 5, "eval_every": 10}
    return replace(stage, model=replace(stage.model, **model), training=replace(stage.training, **training))
size, recipe = {"width": 32, "depth": 1, "heads": 2}, presets.demo()
recipe = replace(recipe, dvae=small(presets.scenes().dvae, width=8, vocab=64),
                 prior=small(recipe.prior, **size), contrastive=small(recipe.contrastive, **size))
demo.Demo.recipe = lambda self: recipe
from limner.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_demo_stops_resumes_and_reports(tmp_path):
    arguments = [
        "demo", "--out", "demo", "--from-scratch", "--scenes", 80, "--captions", 2, "--candidates", 3, "--evaluated", 2,
    ]  # fmt: skip
    process = start(*arguments, cwd=tmp_path, code=TINY_DEMO)
    metrics = tmp_path / "demo" / "run" / "dvae" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode in (0, 130), err
    if process.returncode == 130:
        assert "the same command resumes" in err
    code, out, err = limner(*arguments, cwd=tmp_path, code=TINY_DEMO)
    assert code == 0, err
    assert "best of 3" in out
    folder = tmp_path / "demo"
    report = (folder / "report.html").read_text()
    assert report.count("<article>") == 2
    assert report.count("<svg") >= 5
    assert "data:image/png" in report
    assert Image.open(folder / "contact.png").size[0] > 100
    made = {name: (folder / name).stat().st_mtime_ns for name in ("drawings.safetensors", "composition.json")}
    code, out, err = limner(*arguments, cwd=tmp_path, code=TINY_DEMO)
    assert code == 0
    assert "training" not in err  # all of it is there already
    assert {name: (folder / name).stat().st_mtime_ns for name in made} == made
    code, _, err = limner(*arguments, "--scenes", 90, cwd=tmp_path, code=TINY_DEMO)
    assert code == 2
    assert "other settings" in err
    assert limner("draw", CAPTION, "--model", folder / "run", "--candidates", 1, cwd=tmp_path)[0] == 0
