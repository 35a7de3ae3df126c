"""The commands of docs/guides/scale.md, word by word, in its order and in one folder; smaller models are appended."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs/guides/scale.md").read_text(encoding="utf-8"), re.M | re.S)
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.replace("\\\n", "").splitlines()]
SMALL = {
    "dvae": "model.width=8 model.vocab=64 training.steps=2 training.batch-size=4",
    "prior": "model.width=32 model.depth=2 model.heads=2 training.steps=4 training.batch-size=8",
    "contrastive": "model.width=32 model.depth=1 model.heads=2 training.steps=2 training.batch-size=8",
}
OPTIONS = " ".join(f"--{stage}.{setting}" for stage, settings in SMALL.items() for setting in settings.split())
OPTIONS += " --contrastive.objective.cut-paste-negatives=0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("scale")
    (here / "bin").mkdir()
    for name, runs in {"limner": "limner", "torchrun": "torch.distributed.run"}.items():
        (here / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {runs} "$@"\n')
        (here / "bin" / name).chmod(0o755)
    return here


@pytest.mark.parametrize("command", COMMANDS, ids=[re.sub(r"\s+", " ", line)[:60] for line in COMMANDS])
def test_a_command_does_what_the_page_says(command: str, folder: Path) -> None:
    env = {
        **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    whole = f"{command} {OPTIONS}" if "limner train" in command else command
    done = subprocess.run(["bash", "-euc", whole], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{whole}\n{done.stdout}\n{done.stderr}"
    if "limner train" in command:
        out = folder / re.findall(r"--out (\S+)", command)[0]
        assert list((out / "bundle").glob("*.safetensors"))
    if "powersgd" in command:
        assert done.stderr.count("matrices are compressed to rank 16") == 2  # the dVAE has no blocks
    if "limner plan" in command:
        assert "torchrun --nnodes" in done.stdout


def test_the_reducer_in_another_training_loop(tmp_path: Path) -> None:
    (program,) = [block for kind, block in BLOCKS if kind == "python"]
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(512, 512)]), "head": nn.Linear(512, 1)})
    losses: list[float] = []

    def loss(model: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        found = (model["head"](model["blocks"][0](x)) - 1).square().mean()  # type: ignore[index]
        losses.append(found.item())
        return found

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        names = {
            "model": model, "batches": [torch.randn(8, 512)] * 10, "loss": loss, "distributed": distributed,
            "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
        }  # fmt: skip
        exec(program, names)
    finally:
        distributed.destroy_process_group()
    assert losses[-1] < 0.5 * losses[0]
    assert names["reduction"].error_buffers().keys() == {"blocks.0.weight"}


def test_the_page_is_read_as_blocks() -> None:
    assert {kind for kind, _ in BLOCKS} == {"sh", "python"} and len(COMMANDS) >= 7
