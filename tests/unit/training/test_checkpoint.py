from pathlib import Path

import pytest
import torch
from torch import nn

from limner.errors import UserError
from limner.training import checkpoint
from limner.training.checkpoint import completed, latest, load_model, model_tensors, save


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
    return save(run, step, {"model": {"w": torch.full((2,), float(step))}}, {"step": step}, keep)


def test_the_newest_are_kept_and_nothing_is_pickled(tmp_path: Path) -> None:
    for step in (5, 900, 100_000_000):
        write(tmp_path, step)
    assert [p.name for p in completed(tmp_path)] == ["step-00000900", "step-100000000"]
    assert checkpoint.read_state(completed(tmp_path)[-1]) == {"step": 100_000_000}
    suffixes = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert suffixes == {".safetensors", ".json"}


def test_a_write_that_fails_leaves_the_last_good_one(tmp_path: Path, monkeypatch) -> None:
    good = write(tmp_path, 1, keep=1)
    real = checkpoint.save_file

    def full(tensors, path):
        real(tensors, path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="No space left on device; earlier ones are intact"):
        write(tmp_path, 2, keep=1)
    assert latest(tmp_path) == good
    monkeypatch.undo()
    write(tmp_path, 3, keep=1)  # clears what the failure left
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_what_is_not_complete_does_not_count(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    good = write(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-00000002.tmp").mkdir()
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    assert latest(tmp_path) == good


def test_tied_and_buffered_models_come_back(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    model.count += 3
    assert list(model_tensors(model)) == ["count", "table.weight"]
    path = save(tmp_path, 1, {"model": model_tensors(model)}, {}, 1)
    checkpoint.load_weights(other, tmp_path)
    assert other.head.weight is other.table.weight and other.count == 3
    assert torch.equal(other.table.weight, model.table.weight)
    assert checkpoint.load_weights(other, path) == path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("count"), "lacks 'count'"),
        (lambda t: t.update(extra=torch.ones(1)), "'extra' too many"),
        (lambda t: t.update(count=torch.ones(2)), r"'count' with shape \[2\].* has \[1\]"),
    ],
)
def test_another_model_is_refused_before_anything_is_loaded(change, says: str) -> None:
    model = Tied()
    tensors = {name: t + 1 for name, t in model_tensors(model).items()}
    change(tensors)
    before = model.table.weight.detach().clone()
    with pytest.raises(UserError, match=says):
        load_model(model, tensors, "it")
    assert torch.equal(model.table.weight, before)


def test_damaged_and_absent_files_are_user_errors(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        checkpoint.load_weights(nn.Linear(1, 1), tmp_path)
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.load_weights(nn.Linear(1, 1), tmp_path / "nowhere")


def test_optimiser_state_goes_by_name(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        groups = [{"params": [model[1].weight, model[0].weight]}, {"params": [model[0].bias]}]
        return model, torch.optim.AdamW(groups, fused=True)

    model, optimizer = build()
    for _ in range(3):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    tensors = checkpoint.optimizer_tensors(model, [optimizer])
    assert tensors["exp_avg.0.weight"].shape == (3, 3) and tensors["step.1.weight"] == 3
    save(tmp_path, 1, {"optimizer": tensors}, {}, 1)
    other, fresh = build()
    read = checkpoint.read_tensors(completed(tmp_path)[0], "optimizer")
    checkpoint.load_optimizers(other, [fresh], read, "it")
    assert checkpoint.optimizer_tensors(other, [fresh]).keys() == tensors.keys()
    for name, value in checkpoint.optimizer_tensors(other, [fresh]).items():
        assert torch.equal(value, tensors[name])
    with pytest.raises(UserError, match="does not fit"):
        checkpoint.load_optimizers(other, [fresh], {"exp_avg.0.weight": torch.ones(2, 2)}, "it")
