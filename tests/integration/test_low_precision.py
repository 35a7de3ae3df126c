"""A run in each way of low precision is killed and resumes bit for bit; its bundle draws."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from limner import errors
from limner.config import save_json
from limner.numerics.precision import Fp16, Fp32
from limner.optim.optimizers import AdamW16Config, AdamWConfig
from limner.pipeline import TextToImage
from limner.quantization.precisions import SwitchBack
from limner.recipes.recipe import PretrainedDVAE, Recipe
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.training.checkpoint import completed
from limner.training.metrics_log import read_metrics
from tiny import STEPS, tiny_pipe, tiny_recipe

pytestmark = pytest.mark.slow

WAYS = {
    **{
        f"fp16-{scaling}": {"precision": Fp16(), "scaling": scaling}
        for scaling in ("resblocks", "resblocks-partial", "loss", "tensors")
    },
    "int8": {"precision": SwitchBack()},
    "moments": {"precision": Fp32(), "optimizer": AdamW16Config(lr=1e-3)},
}
CLOCKS = {"seconds", "samples_per_s"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Pictures, and a dVAE."""
    folder = tmp_path_factory.mktemp("data")
    write_scenes(folder / "data", SceneDataSettings(count=24, size=24, held_out=0.2))
    tiny_pipe().save_pretrained(folder / "bundle")
    return folder


def recipe(folder: Path, way: str) -> Recipe:
    r = replace(tiny_recipe(), dvae=PretrainedDVAE(bundle=str(folder / "bundle")))
    prior, contrastive = (
        replace(stage, training=replace(stage.training, **{"optimizer": AdamWConfig(lr=1e-3)} | WAYS[way]))
        for stage in (r.prior, r.contrastive)
    )
    return replace(r, prior=prior, contrastive=contrastive)


def killed(recipe: Recipe, folder: Path, out: Path) -> None:
    """Begin in another process, which dies after some steps of the prior."""
    save_json(recipe, out.with_suffix(".json"))
    env = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])}
    command = [sys.executable, "-m", "limner", "train", str(folder / "data"), "--out", str(out)]
    with subprocess.Popen([*command, "--recipe", str(out.with_suffix(".json"))], env=env) as process:
        deadline = time.monotonic() + 120
        while not completed(out / "prior"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert 0 < int(completed(out / "prior")[-1].name.removeprefix("step-")) < STEPS


def rows(out: Path, stage: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in read_metrics(out / stage / "metrics.jsonl")]


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_resumes_bit_for_bit_and_draws(way: str, folder: Path, tmp_path: Path) -> None:
    tested = recipe(folder, way)
    killed(tested, folder, tmp_path / "parts")
    for out in ("parts", "whole"):
        assert train_all(tested, folder / "data", tmp_path / out) is not None
    for stage in ("prior", "contrastive"):
        parts, whole = (rows(tmp_path / out, stage) for out in ("parts", "whole"))
        assert parts == whole and [row["step"] for row in whole] == list(range(1, STEPS + 1))
        weights = (tmp_path / out / "bundle" / f"{stage}.safetensors" for out in ("parts", "whole"))
        assert len({file.read_bytes() for file in weights}) == 1
    assert any(name.startswith("scale") for name in rows(tmp_path / "parts", "prior")[-1]) == way.startswith("fp16")
    drawn = TextToImage.from_pretrained(tmp_path / "parts" / "bundle")("a red circle", n=1, candidates=2, seed=0)
    assert drawn.images[0].size == (24, 24)
