"""The commands of docs/guides/scale.md, word by word, in its order and in one folder; smaller models are appended."""

import re
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from pages import add_programs, shell, steps

pytestmark = pytest.mark.slow

STEPS = steps("docs/guides/scale.md")
COMMANDS = [text for kind, text in STEPS if kind == "sh"]
SMALL = {
    "dvae": "model.width=8 model.vocab=64 training.steps=2 training.batch-size=4",
    "prior": "model.width=32 model.depth=4 model.heads=2 training.steps=4 training.batch-size=8",
    "contrastive": "model.width=32 model.depth=1 model.heads=2 training.steps=2 training.batch-size=8",
}
OPTIONS = " ".join(f"--{stage}.{setting}" for stage, settings in SMALL.items() for setting in settings.split())
OPTIONS += " --contrastive.objective.cut-paste-negatives=0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("scale")
    add_programs(here)
    return here


@pytest.mark.parametrize("command", COMMANDS, ids=[re.sub(r"\s+", " ", line)[:60] for line in COMMANDS])
def test_a_command_does_what_the_page_says(command: str, folder: Path) -> None:
    done = shell(f"{command} {OPTIONS}" if "limner train" in command else command, folder)
    if "limner train" in command:
        out = folder / re.findall(r"--out (\S+)", command)[0]
        assert list((out / "bundle").glob("*.safetensors"))
    if "powersgd" in command:
        assert done.stderr.count("matrices are compressed to rank 16") == 2  # the dVAE lacks blocks
    if "limner plan" in command:
        assert "torchrun --nnodes" in done.stdout


def test_the_reducer_in_another_training_loop(tmp_path: Path) -> None:
    (program,) = [block for kind, block in STEPS if kind == "python"]
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


def test_the_page_is_read_as_steps() -> None:
    assert {kind for kind, _ in STEPS} == {"sh", "python"} and len(COMMANDS) >= 7
