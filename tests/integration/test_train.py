"""`limner train` as a user runs it: two stages at a time, interrupted, killed, continued."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from limner import bundles, errors
from limner.atomic_io import file_hash
from limner.cli import main
from limner.config import save_json
from limner.errors import UserError
from limner.models.dvae import DVAEConfig
from limner.models.transformer import TransformerConfig
from limner.runs.parallel_stage import LOG_FILE
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.training.checkpoint import latest
from limner.training.metrics_log import read_metrics
from tiny import STEPS, tiny_recipe


@pytest.fixture
def data(tmp_path):
    write_scenes(tmp_path / "data", SceneDataSettings(count=24, size=24, held_out=0.2))
    save_json(tiny_recipe(), tmp_path / "recipe.json")
    return tmp_path


def start(folder: Path) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "limner", "train", "data", "--recipe", "recipe.json", "--out", "run"]
    return subprocess.Popen(
        command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip


def wait_for(folder: Path, stage: str, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not any(row["step"] >= step for row in read_metrics(folder / "run" / stage / "metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def beside(folder: Path) -> list[str]:
    """Processes that train this folder's contrastive model."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"limner.runs.parallel_stage" in (path / "cmdline").read_bytes() and (path / "cwd").resolve() == folder:
                found.append(path.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_two_stages_train_together_and_stop_together(data):
    with start(data) as process:
        wait_for(data, "prior", 3, process)
        wait_for(data, "contrastive", 3, process)
        assert len(beside(data)) == 1
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "the same command resumes" in output
    assert not beside(data)
    saved = latest(data / "run" / "contrastive")
    assert saved is not None
    assert 3 <= int(saved.name.removeprefix("step-")) < STEPS

    with start(data) as process:  # killed, it leaves none behind
        wait_for(data, "contrastive", int(saved.name.removeprefix("step-")) + 1, process)
        process.kill()
    deadline = time.monotonic() + 60
    while beside(data):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    with start(data) as process:
        _, output = process.communicate(timeout=300)
    assert process.returncode == 0, output
    for stage in ("prior", "contrastive"):
        assert [row["step"] for row in read_metrics(data / "run" / stage / "metrics.jsonl")] == list(
            range(1, STEPS + 1)
        )
    assert (data / "run" / "bundle" / "config.json").exists()


def test_an_error_of_the_parallel_process_is_reported(data):
    (data / "run").mkdir()
    (data / "run" / "contrastive").write_text("where a folder should be")
    with start(data) as process:
        _, output = process.communicate(timeout=120)
    assert process.returncode == 2
    assert output.splitlines()[-1].startswith("limner: training the contrastive model in parallel failed")
    assert LOG_FILE in output


def test_training_continues_from_a_bundle(data):
    recipe = tiny_recipe()
    few = {
        stage: replace(getattr(recipe, stage), training=replace(getattr(recipe, stage).training, steps=2))
        for stage in ("dvae", "prior", "contrastive")
    }
    first = train_all(replace(recipe, **few), data / "data", data / "first")
    assert first is not None
    stored = bundles.load_model(data / "first", "dvae").state_dict()
    for name, value in first.dvae.state_dict().items():  # what the prior learned from is what the bundle holds
        assert torch.equal(value, stored[name])
    start = str(data / "first")
    rested = replace(few["prior"], training=replace(few["prior"].training, steps=1, warmup_steps=10**9, ema_decay=None))
    continued = replace(recipe, **{**few, "prior": rested}, start=start)
    second = train_all(continued, data / "data", data / "second", ("prior",))
    assert second is not None
    tokenizers = [(state.tokenizer.vocab, state.tokenizer.merges) for state in (first, second)]
    assert tokenizers[0] == tokenizers[1]
    models, _, _ = bundles.read(data / "first" / "bundle")
    for part, near in (("dvae", 0), ("contrastive", 0), ("prior", 1e-3)):  # the prior made a step of no size
        weights = getattr(second, part).state_dict()
        for name, value in models[part].state_dict().items():
            torch.testing.assert_close(weights[name], value, atol=near, rtol=near)

    other = replace(continued, prior=replace(rested, model=TransformerConfig(width=48, depth=2, heads=2)))
    with pytest.raises(UserError, match="the prior of .* has other settings than the recipe .width"):
        train_all(other, data / "data", data / "third", ("prior",))
    with pytest.raises(UserError, match="start"):  # the same folder, from elsewhere
        train_all(replace(continued, start=str(data / "first" / "bundle")), data / "data", data / "second", ("prior",))


SHORT = {
    "text.vocab": 300, "text.length": 16,
    "prior.model.width": 32, "prior.model.depth": 2, "prior.model.heads": 2,
    "prior.training.steps": 3, "prior.training.batch-size": 2,
    "contrastive.model.width": 16, "contrastive.model.depth": 1, "contrastive.model.heads": 2,
    "contrastive.model.patch": 8, "contrastive.model.embedding": 8,
    "contrastive.training.steps": 3, "contrastive.training.batch-size": 2,
}  # fmt: skip


def test_any_recipe_takes_an_imported_dvae_and_keeps_its_tokens(data, monkeypatch, capsys):
    monkeypatch.chdir(data)
    torch.manual_seed(0)
    theirs = DVAEConfig(size=24, width=16, groups=3, blocks=1, vocab=32, code_width=8, code_gain=3.0).build()
    for half in ("encoder", "decoder"):
        torch.save(getattr(theirs, half).state_dict(), f"{half}.pkl")
    assert main(["convert", "openai-dvae", "encoder.pkl", "decoder.pkl", "dvae", "--size", "24"]) == 0
    train = ["train", "data", "--recipe", "tiny", *(f"--{name}={value}" for name, value in SHORT.items())]
    assert main([*train, "--out", "run", "--dvae.bundle", "dvae"]) == 0
    pixels = torch.randint(0, 256, (8, 3, 24, 24), dtype=torch.uint8)
    bundle = bundles.read(data / "run" / "bundle")[0]
    assert torch.equal(bundle["dvae"].tokenize(pixels), theirs.tokenize(pixels))
    assert (bundle["prior"].config.grid, bundle["prior"].config.image_vocab) == ((6, 6), 32)
    assert bundle["contrastive"].config.size == 24
    assert main(["draw", "a red circle", "--model", "run", "--candidates", "2", "-o", "drawing.png"]) == 0
    again = ["train", "data", "--recipe", "run/recipe.json", "--out", "again", "--stages", "prior", "--dvae.bundle=run"]
    assert main(again) == 0  # now from the bundle, and with a recipe that borrows one already
    capsys.readouterr()
    for wrong, says in (
        (["--dvae.bundle", "data"], "data is not a bundle"),
        (["--dvae.bundle", "nowhere"], "unknown model 'nowhere'"),
        (["--dvae.bundle"], "--dvae.bundle"),
        (
            ["--dvae.bundle", "dvae", "--dvae.training.steps", "3"],
            "--dvae.training.steps configures a new dVAE",
        ),
        (["--dvae.bundle", "dvae", "--stages", "dvae"], "leave dvae out of --stages"),
    ):
        assert main([*train, "--out", "wrong", *wrong]) == 2
        output = capsys.readouterr().err
        assert says in output and output.count("\n") == 1, output


def test_a_deterministic_run_gives_the_same_weights_again(data, monkeypatch):
    monkeypatch.chdir(data)
    hashes = []
    for out in ("first", "second"):
        assert main(["train", "data", "--recipe", "recipe.json", "--out", out, "--deterministic"]) == 0
        assert not torch.are_deterministic_algorithms_enabled()
        hashes.append({p.name: file_hash(p) for p in (data / out / "bundle").glob("*.safetensors")})
    assert hashes[0] == hashes[1] and len(hashes[0]) >= 3
