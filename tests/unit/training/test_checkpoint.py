import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoints import read_tensors
from limner.errors import UserError
from limner.training import checkpoint
from limner.training.checkpoint import Checkpointer, completed, fill_model, latest, model_tensors
from limner.training.state import load_optimizers, optimizer_tensors


class Tied(nn.Module):
    count: torch.Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(6, width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.zeros(1))


def write(run: Path, step: int, keep: int = 2) -> Path:
    return Checkpointer(run, keep).save(step, {"model": {"w": torch.full((2,), float(step))}}, {"step": step})


def test_the_newest_are_kept_and_nothing_is_pickled(tmp_path: Path) -> None:
    for step in (5, 900, 100_000_000):
        write(tmp_path, step)
    assert [p.name for p in completed(tmp_path)] == ["step-00000900", "step-100000000"]
    assert checkpoint.read_state(completed(tmp_path)[-1]) == {"step": 100_000_000}
    suffixes = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert suffixes == {".safetensors", ".json", ""}  # the last are the sums


def test_a_write_that_fails_leaves_the_last_good_one(tmp_path: Path, monkeypatch) -> None:
    good = write(tmp_path, 1, keep=1)
    real = checkpoint.save_file

    def full(tensors, path):
        real(tensors, path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="No space left on device; earlier checkpoints are intact"):
        write(tmp_path, 2, keep=1)
    assert latest(tmp_path) == good
    monkeypatch.undo()
    write(tmp_path, 3, keep=1)  # clears what the failure left
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_two_processes_that_start_together_get_different_numbers(tmp_path: Path, monkeypatch) -> None:
    Checkpointer(tmp_path, 1).acquire()
    second, newest = Checkpointer(tmp_path, 1), [0, 1]  # the first start is not visible yet
    monkeypatch.setattr(second, "_newest", lambda: newest.pop(0))
    second.acquire()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["start-00000002"]


def test_skipped_updates_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.skipped_updates(tmp_path) == (0, 0)
    for step, skipped in ((5, 1), (9, 2)):
        Checkpointer(tmp_path, 2).save(step, {}, {"step": step, "skipped": skipped})
    assert checkpoint.skipped_updates(tmp_path) == (2, 9)


def test_files_of_a_killed_process_are_ignored_and_removed(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    good = write(tmp_path, 1)
    for name in ("step-00000002.tmp", ".step-00000003.01234567.tmp", "other"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-00000004").touch()  # no folder
    assert latest(tmp_path) == good
    Checkpointer(tmp_path, 1).acquire()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {good.name, "start-00000001"}


def test_only_the_newest_start_of_a_run_saves(tmp_path: Path) -> None:
    older, newer = Checkpointer(tmp_path, 2), Checkpointer(tmp_path, 2)
    for files in (older, newer):
        files.acquire()
    good = newer.save(4, {"model": {"x": torch.zeros(2)}}, {"step": 4})
    with pytest.raises(
        UserError, match=r"has restarted .* \(start 2; this is start 1\): this process stops without saving"
    ):
        older.save(6, {"model": {"x": torch.ones(2)}}, {"step": 6})
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {good.name, "start-00000002"}
    newer.save(6, {"model": {"x": torch.ones(2)}}, {"step": 6})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "a bit": flip,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "without end": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "SHA256SUMS"])
def test_the_newest_whole_checkpoint_serves(name: str, damage: str, tmp_path: Path) -> None:
    good, damaged = write(tmp_path, 1), write(tmp_path, 2)
    DAMAGES[damage](damaged / name)
    with pytest.warns(UserWarning, match="step-00000002 is damaged .*using step-00000001 instead") as caught:
        assert latest(tmp_path) == good
    assert len(caught) == 1
    assert write(tmp_path, 2) == damaged == latest(tmp_path)  # written again in its place
    for path in (good, damaged):
        DAMAGES[damage](path / name)
    with pytest.raises(UserError, match=r"step-00000002 is damaged .*no older checkpoint is intact"):
        latest(tmp_path)


def test_the_sums_are_those_of_the_usual_tool(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


def test_states_come_back_in_the_layout_of_their_parameters() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        optimizer.step()

    (model, optimizer), (other, fresh) = build(), build()
    step(model, optimizer)
    tensors = optimizer_tensors(model, [optimizer])
    tensors = {k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}  # as on disk
    other.load_state_dict(model.state_dict())
    load_optimizers(other, [fresh], tensors, "it")
    assert fresh.state[other.weight]["exp_avg"].stride() == other.weight.stride()
    for pair in ((model, optimizer), (other, fresh)):
        step(*pair)
    assert torch.equal(model.weight, other.weight)


def test_tied_and_buffered_models_come_back(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    model.count += 3
    assert list(model_tensors(model)) == ["count", "table.weight"]
    path = Checkpointer(tmp_path, 1).save(1, {"model": model_tensors(model)}, {})
    checkpoint.load_weights(other, tmp_path)
    assert other.head.weight is other.table.weight and other.count == 3
    assert torch.equal(other.table.weight, model.table.weight)
    assert checkpoint.load_weights(other, path) == path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("count"), "lacks 'count'"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected tensor 'extra'"),
        (lambda t: t.update(count=torch.ones(2)), r"'count' has shape \[2\].* \[1\] in the model"),
    ],
)
def test_another_model_is_refused_before_anything_is_loaded(change, says: str) -> None:
    model = Tied()
    tensors = {name: t + 1 for name, t in model_tensors(model).items()}
    change(tensors)
    before = model.table.weight.detach().clone()
    with pytest.raises(UserError, match=says):
        fill_model(model, tensors, "it")
    assert torch.equal(model.table.weight, before)


def test_damaged_and_absent_files_are_user_errors(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(UserError, match=r"cannot read .*model\.safetensors"):
        checkpoint.load_weights(nn.Linear(1, 1), path)
    with pytest.raises(UserError, match="contains no checkpoint"):
        checkpoint.load_weights(nn.Linear(1, 1), tmp_path / "nowhere")


def test_optimizer_state_is_matched_by_name(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        groups = [{"params": [model[1].weight, model[0].weight]}, {"params": [model[0].bias]}]
        return model, torch.optim.AdamW(groups, fused=True)

    model, optimizer = build()
    for _ in range(3):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    tensors = optimizer_tensors(model, [optimizer])
    assert tensors["exp_avg.0.weight"].shape == (3, 3) and tensors["step.1.weight"] == 3
    Checkpointer(tmp_path, 1).save(1, {"optimizer": tensors}, {})
    other, fresh = build()
    read = read_tensors(completed(tmp_path)[0], "optimizer")
    load_optimizers(other, [fresh], read, "it")
    assert optimizer_tensors(other, [fresh]).keys() == tensors.keys()
    for name, value in optimizer_tensors(other, [fresh]).items():
        assert torch.equal(value, tensors[name])
    with pytest.raises(UserError, match="does not fit"):
        load_optimizers(other, [fresh], {"exp_avg.0.weight": torch.ones(2, 2)}, "it")


def test_a_file_of_tensors_without_a_checksum_is_damage(tmp_path: Path) -> None:
    good, damaged = write(tmp_path, 1), write(tmp_path, 2)
    (damaged / "ema.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    with pytest.warns(UserWarning, match=r"is damaged \(ema.safetensors is not in SHA256SUMS\): using step-00000001"):
        assert latest(tmp_path) == good
