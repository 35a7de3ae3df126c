"""`limner inspect precision`: a run in 8 bits, from its recipe to its bundle and its record."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from torch import nn

from limner.cli import main
from limner.numerics.precision import Bf16
from limner.optim.optimizers import AdamW16Config
from limner.pipeline import load
from limner.quantization.precisions import Fp8SwitchBack, Fp16Weights, SwitchBack
from limner.runs.train import train_all
from limner.tasks.build_scenes import SceneDataSettings, write_scenes
from limner.training.kernel_report import FILE
from tiny import tiny_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    write_scenes(folder / "scenes", SceneDataSettings(count=24, size=24, held_out=0.3))
    recipe = tiny_recipe()
    recipe = replace(
        recipe,
        prior=replace(recipe.prior, training=replace(recipe.prior.training, steps=20, precision=SwitchBack())),
        contrastive=replace(
            recipe.contrastive, training=replace(recipe.contrastive.training, steps=5, precision=Fp8SwitchBack())
        ),
    )
    pipe = train_all(recipe, folder / "scenes", folder / "run")
    assert pipe is not None
    for drawing in (pipe, load(folder / "run"), load(folder / "run", precision=Bf16())):  # ordinary layers again
        assert {type(x) for x in drawing.prior.modules() if isinstance(x, nn.Linear)} == {nn.Linear}
        assert len(drawing("a red circle", n=1, candidates=2).images) == 1
    return folder / "run"


def test_each_layer_is_listed_with_its_kernels(run, capsys):
    assert main(["inspect", "precision", str(run)]) == 0
    prior, contrastive = capsys.readouterr().out.split("\n\n")
    lines = prior.splitlines()
    assert lines[0] == "prior: SwitchBack, 20 steps"
    assert lines[1].split("  ")[0] == "layer" and lines[1].endswith("weight gradient")
    assert sum("SwitchBackLinear" in line for line in lines) == 8
    assert [line.split()[:2] for line in lines if "torch's" in line] == [
        ["head.text", "Linear"],
        ["head.image", "Linear"],
    ]
    row = lines[3]
    assert "blocks.0.attention.branch.qkv" in row and "SwitchBackLinear" in row and "_int_mm x 20" in row
    assert lines[-1].startswith("fallbacks: 0 of")
    assert contrastive.startswith("contrastive model: Fp8SwitchBack, 5 steps")
    assert "products: " in contrastive and "to simulated, since this device cannot multiply float8" in contrastive
    assert main(["inspect", "precision", str(run / "prior")]) == 0
    assert "_int_mm x 20" in capsys.readouterr().out


def test_weights_in_16_bits_are_listed_and_their_bundle_draws(run, capsys, tmp_path):
    recipe = tiny_recipe()
    training = replace(
        recipe.prior.training, steps=5, precision=Fp16Weights(), scaling="resblocks", optimizer=AdamW16Config(lr=1e-3)
    )
    recipe = replace(recipe, prior=replace(recipe.prior, training=training))
    train_all(recipe, run.parent / "scenes", tmp_path / "run")
    assert len(load(tmp_path / "run")("a red circle", n=1, candidates=2).images) == 1
    capsys.readouterr()
    assert main(["inspect", "precision", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "prior: Fp16Weights, 5 steps"
    rows = [line.split()[:3] for line in lines if line.startswith(("blocks", "head"))]
    assert len(rows) == 10 and all(
        row[1:] == (["Linear", "float32"] if row[0].startswith("head") else ["HalfLinear", "float16"]) for row in rows
    )
    assert main(["inspect", "underflow", str(tmp_path / "run"), str(run.parent / "scenes")]) == 0  # in fp32, as ever


def test_a_folder_without_such_a_run_is_reported(run, capsys, tmp_path):
    def says(path):
        assert main(["inspect", "precision", str(path)]) == 2
        return capsys.readouterr().err

    assert "is not a run folder" in says(tmp_path / "nothing")
    assert "is not a run folder" in says(tmp_path)
    shutil.copytree(run, tmp_path / "run")
    for file in (tmp_path / "run").glob(f"*/{FILE}"):
        file.unlink()
    assert "lacks records of low-precision layers: train with" in says(tmp_path / "run")
    wrong = tmp_path / "run" / "prior" / FILE
    good = json.loads((run / "prior" / FILE).read_text())
    product = {"product": "forward", "kernel": "reference", "fallback_reason": "", "count": math.inf}
    endless = [{**good["layers"][0], "products": [product]}]
    others = {**good, "step": "x"}, {**good, "step": math.inf}, {**good, "layers": endless}
    for content in ([], {}, None, {**good, "layers": [{}]}, {**good, "layers": 3}, *others):
        wrong.write_text(json.dumps(content))
        assert "is damaged" in says(tmp_path / "run")
    wrong.write_text("{")
    assert "not valid JSON" in says(tmp_path / "run")
    wrong.write_text(json.dumps({**good, "precision": "\x1b[31m", "layers": []}))
    assert main(["inspect", "precision", str(tmp_path / "run")]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["inspect", "precisoin", str(run)]) == 2
    assert "did you mean 'precision'" in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["dvae", "prior", "contrastive"])
def test_the_graph_of_a_run_is_that_of_its_training(run, capsys, tmp_path, stage):
    assert main(["inspect", "graph", str(run), "--stage", stage, "-o", str(tmp_path / "graph.svg")]) == 0
    assert f"written: {tmp_path / 'graph.svg'}" in capsys.readouterr().out
    svg = (tmp_path / "graph.svg").read_text()
    assert svg.startswith("<svg") and f"{stage} of {run}: " in svg
    assert main(["inspect", "graph", str(run), "--stage", stage]) == 0
    whole = capsys.readouterr().out
    assert ("blocks.0.mlp" in whole) == (stage != "dvae")
    assert ("/_SummedCrossEntropy" in whole) == (stage == "prior")


def test_the_graph_of_a_bundle_opens_modules_and_takes_settings(run, capsys):
    command = ["inspect", "graph", str(run / "bundle"), "--open", "blocks.1.mlp.branch.up", "--samples", "3"]
    assert main([*command, "--precision", "switchbackm", "--checkpointing"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("nodes, a batch of 3")
    (ours,) = [line for line in lines if line.startswith("          _LowPrecisionFunction, [")]
    assert "quantization/low_precision.py:" in ours
    saved = lines[lines.index(ours) + 1 :]
    assert any("saves tensors[1]" in line and "int8" in line and "recomputed" in line for line in saved[:9])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--open", "blocks.0.mpl"], "in a module 'blocks.0.mpl': did you mean 'blocks.0.mlp'"),
        (["--precision", "int7"], "--precision cannot be 'int7'"),
        (["--stage", "contrastive", "--checkpointing"], "cannot recompute activations"),
        (["--samples", "0"], "samples must be at least 1, not 0"),
    ],
)
def test_a_wrong_option_of_the_graph_is_one_sentence(run, capsys, options, message):
    assert main(["inspect", "graph", str(run / "bundle"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
