"""The examples of CONTRIBUTING.md run as printed, in their order, and do what the text says."""

import math
import os
import re
import subprocess
import sys
from copy import deepcopy
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import limner.cli
from limner.attention.attention import attend, attention_mask
from limner.attention.patterns import PATTERNS
from limner.attention.sparse import SparseAttention
from limner.cli.evaluate import EVALUATIONS
from limner.config import from_dict
from limner.data.datasets import ImageCaptionDataset
from limner.data.open_source import READERS
from limner.evaluation.features import EXTRACTORS, extract, open_extractor
from limner.metrics.fidelity import METRICS, compare
from limner.models.contrastive import CLIPConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.pipeline import TextToImage
from limner.recipes import recipe
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_state import TrainState
from tiny import tiny_pipe

SOURCE = Path(limner.__path__[0]).parent
TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = iter(re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S))
PATTERN, READER, OBJECTIVE, LOOP, CHOICE, TOKENIZER, PRIOR, PRECISION, REDUCER, PARALLEL = islice(EXAMPLES, 10)
METRIC, EVALUATION, COMMAND, LINE = EXAMPLES


def test_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATTERNS, "diagonal", None)  # so that it is taken out again afterwards
    exec(PATTERN, {})
    pattern = PATTERNS["diagonal"]((6, 5), 3)
    assert pattern.offsets == (0, 6, 12)
    q, k, v = torch.randn(3, 2, 2, 4 + 30, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(SparseAttention(pattern, 4)(q, k, v), attend(q, k, v, attention_mask(pattern, 4)))
    stage = {"model": {"pattern": "diagonal", "depth": 3}, "training": {"steps": 1}}
    assert {made.name for made in from_dict(recipe.PriorStage, stage).model.patterns} == {"diagonal"}


def test_a_source_and_an_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(READERS, ("gray",), None)
    names: dict = {"__name__": "example"}
    exec(READER + OBJECTIVE + LOOP, names)
    assert names["result"].step == 3
    assert (tmp_path / "run/metrics.jsonl").exists()
    read = ImageCaptionDataset(names["source"], 32)
    _, pixels, _, rejected = read.load(np.arange(7))
    assert pixels[:, 0, 0, 0].tolist() == [0, 40, 80, 160, 200, 240] and dict(rejected) == {"not a number": 1}


def test_an_image_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(READERS, ("gray",), None)
    names: dict = {"__name__": "example"}
    exec(READER + OBJECTIVE + LOOP + TOKENIZER + PRIOR, names)
    assert names["run"].step == 3
    clip = CLIPConfig(
        text_vocab=names["words"].vocab_size, text_len=8, size=32, width=16, depth=1, heads=2, embedding=8
    )
    pipe = TextToImage(names["brightness"], names["prior"], clip.build(), names["words"])
    ((drawing, *_),) = pipe.draw_many(["gray of 80"], candidates=2)
    pixels = np.asarray(drawing.image)
    assert pixels.shape == (32, 32, 3) and np.ptp(pixels, axis=2).max() == 0  # gray
    assert np.array_equal(pixels, np.repeat(np.repeat(pixels[::4, ::4], 4, 0), 4, 1))
    tokens = names["brightness"].tokenize(torch.full((1, 3, 32, 32), 80, dtype=torch.uint8))
    assert abs(int(names["brightness"].decode_tokens(tokens)[0, 0, 0, 0]) - 80) <= 8


def test_an_objective_of_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """`recipe.py` with the line of the example accepts the objective."""
    line = CHOICE.removesuffix("\n")
    was = line.replace(" | AbsoluteError", "")
    changed = Path(recipe.__file__).read_text(encoding="utf-8")
    assert changed.count(f"\n{was}\n") == 1
    monkeypatch.setitem(sys.modules, "example", module := ModuleType("example"))
    exec(OBJECTIVE, vars(module))
    exec(compile(changed.replace(was, line), "recipe.py", "exec"), vars(module))
    stage = from_dict(
        module.DVAEStage,
        {
            "model": {"size": 32, "width": 8, "blocks": 1, "vocab": 16, "code_width": 8},
            "objective": {"type": "AbsoluteError", "tau": 0.5},
            "training": {"steps": 1, "precision": "fp32"},
        },
    )
    assert stage.objective == module.AbsoluteError(tau=0.5)
    run = TrainState(stage.model.build(), stage.objective, stage.training)
    update(run, {"pixels": torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)})
    assert math.isfinite(run.loss)


def test_a_precision() -> None:
    names: dict = {"__name__": "example"}
    exec(PRECISION, names)
    config = TrainConfig(steps=1, precision=names["CarefulBf16"]())
    plain = TransformerConfig(text_vocab=8, image_vocab=8, text_len=2, grid=(2, 2), width=16, depth=2, heads=2).build()
    run = TrainState(deepcopy(plain), Autoregressive(), config)
    x = torch.randn(3, 64)
    with config.precision.autocast("cpu"):
        kinds = [(b.mlp.branch.down(x).dtype, b.attention.branch.qkv(x[:, :16]).dtype) for b in run.model.blocks]
    assert kinds == [(torch.float32, torch.bfloat16)] * 2
    rng = torch.Generator().manual_seed(0)
    update(run, {name: torch.randint(8, (4, n), generator=rng) for name, n in (("text", 2), ("image", 4))})
    assert math.isfinite(run.loss)
    changed = {n for n, p in run.model.named_parameters() if not torch.equal(p, plain.get_parameter(n))}
    assert {f"blocks.{i}.mlp.branch.down.weight" for i in (0, 1)} <= changed


RANK = """
import sys
from typing import get_args, get_type_hints
import numpy as np
import torch
from torch import distributed, nn
from limner.cli.train import Train
from limner.data.stream import Stream
from limner.distributed.process_group import REDUCERS
from limner.distributed.replicated import Replicated
from limner.numerics.precision import Fp32
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.train_state import TrainState


class Line:
    def __len__(self):
        return 16

    def batch(self, indices, seeds):
        x = torch.from_numpy(np.asarray(indices)).float()[:, None] / 16
        return {"x": x, "y": 3 * x - 1}


def squared_error(model, batch, step, generator):
    return (model(batch["x"]) - batch["y"]).square().mean(), {}


distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
torch.manual_seed(0)
model = nn.Linear(1, 1)
config = TrainConfig(steps=30, batch_size=4, precision=Fp32(), clip_norm=None)
train(TrainState(model, squared_error, config, parallel=STRATEGY), Stream(Line(), batch_size=4), sys.argv[3])
assert set(REDUCERS) == set(get_args(get_type_hints(Train)["grad_compression"]))
print(model.weight.item(), model.bias.item())
distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("example", "strategy"), [(REDUCER, 'Replicated(REDUCERS["1-6-9"])'), (PARALLEL, "HalfTraffic()")]
)
def test_a_way_to_reduce_gradients(example: str, strategy: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(example + RANK.replace("STRATEGY", strategy))
    started = [
        subprocess.Popen(
            [sys.executable, tmp_path / "rank.py", str(rank), tmp_path / "meet", tmp_path / "run"],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    output = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert output[0] == output[1] != ""  # each has seen its half of every batch only


def test_a_metric_and_an_extractor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "mean", None)
    monkeypatch.setitem(EXTRACTORS, "color", None)
    exec(METRIC, {"__name__": "example"})
    color = open_extractor("color", tiny_pipe())
    dark, light = (extract(color, [torch.full((10, 3, 8, 8), value, dtype=torch.uint8)])[0] for value in (10, 30))
    found = compare(dark, light, color.name, torch.tensor([[1.0] * 10, [10.0] + [0.0] * 9]))
    assert found["mean[color]"].tolist() == pytest.approx([20 * 3**0.5] * 2)


def test_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("limner.cli.evaluate.EVALUATIONS", [*EVALUATIONS])
    monkeypatch.setitem(sys.modules, "example", module := ModuleType("example"))
    exec(EVALUATION, vars(module))
    bundle, page = tiny_pipe().save_pretrained(tmp_path / "tiny"), tmp_path / "page.html"
    assert limner.cli.main(["evaluate", "brightness", str(bundle), "red", "--page", str(page)]) == 0
    assert re.search(r"^tiny\nred\n.*^brightness +\d+\.\d\d \(", capsys.readouterr().out, re.M | re.S)
    text = page.read_text()
    assert "<td>brightness</td>" in text and "limner evaluate brightness" in text


def test_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(limner.cli, "COMMANDS", dict(limner.cli.COMMANDS))
    (tmp_path / "greet.py").write_text(COMMAND)
    monkeypatch.setattr(limner.cli, "__path__", [*limner.cli.__path__, str(tmp_path)])
    exec(LINE, vars(limner.cli))
    assert limner.cli.main(["greet", "world"]) == 0
    assert capsys.readouterr().out == "hello, world\n"
    assert limner.cli.main(["greet", " "]) == 2
    with pytest.raises(SystemExit, match="0"):
        limner.cli.main(["greet", "--help"])
    assert "Say hello to somebody" in capsys.readouterr().out
