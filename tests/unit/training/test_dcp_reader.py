"""Shard files in the documented format, read without the library that writes them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from checkpoints import read_tensors
from limner.errors import UserError
from limner.planner.memory_tracker import MemoryTracker
from limner.training import dcp_reader
from limner.training.checkpoint import Checkpointer, completed, latest, load_weights

WEIGHT, MEAN = torch.arange(15.0).view(5, 3), torch.arange(15, dtype=torch.int16).view(5, 3)


def write(folder: Path, number: int, parts: dict[str, tuple[Tensor, list[int]]]) -> None:
    """The file of a rank (from 1): by name a part and where it begins."""
    header = {key: {"saved_offsets": at} for key, (_, at) in parts.items()}
    save_file(
        {key: part.contiguous() for key, (part, _) in parts.items()},
        folder / f"shard-{number:05d}-model-00001-of-00001.safetensors",
        {"DCP_SHARDING_INFO": json.dumps(header), "format": "pt"},
    )


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A checkpoint of three ranks; the last one has an empty part."""
    write(tmp_path, 1, {"model/weight": (WEIGHT[:3], [0, 0]), "optimizer/mean.weight": (MEAN[:, :2], [0, 0])})
    write(tmp_path, 2, {"model/weight": (WEIGHT[3:], [3, 0]), "optimizer/mean.weight": (MEAN[:, 2:], [0, 2])})
    write(tmp_path, 3, {"model/weight": (WEIGHT[5:], [5, 0]), "optimizer/step.weight": (torch.tensor(7.0), [])})
    return tmp_path


def test_parts_are_joined_and_groups_are_chosen(three: Path) -> None:
    groups = dcp_reader.read(three, None, {"weight": nn.Parameter(WEIGHT)})
    assert groups.keys() == {"model", "optimizer"}
    assert torch.equal(groups["model"]["weight"], WEIGHT)
    assert groups["optimizer"]["mean.weight"].dtype == torch.int16
    assert torch.equal(groups["optimizer"]["mean.weight"], MEAN) and groups["optimizer"]["step.weight"] == 7
    assert dcp_reader.read(three, ("model", "ema"), {}).keys() == {"model"}
    assert torch.equal(read_tensors(three, "model")["weight"], WEIGHT)


def test_states_written_by_single_replicas_are_read_on_the_ranks_that_ask(three: Path) -> None:
    for number, replica in ((4, 10), (5, 2)):
        write(three, number, {f"errors.{replica}/weight": (WEIGHT + replica, [0, 0])})
    write(three, 6, {"errors.x/odd": (WEIGHT, [0, 0])})
    assert dcp_reader.replica_groups(three) == {"errors.2": ["weight"], "errors.10": ["weight"]}
    assert dcp_reader.read(three, None, {}).keys() == {"errors.x", "model", "optimizer"}
    model = nn.Linear(3, 5, bias=False)
    for replicas, expected in ((1, [2, 10]), (3, [2, 10]), (2, [2])):
        found = [group["weight"] for group in Checkpointer(three, 1).error_buffers(three, model, replicas, 2)]
        assert len(found) == len(expected)
        assert all(torch.equal(x, WEIGHT + replica) for x, replica in zip(found, expected, strict=True))
    assert not list(Checkpointer(three, 1).error_buffers(three / "none", model))


def test_weights_of_shards_load_into_a_model_alone(three: Path) -> None:
    model = nn.Linear(3, 5, bias=False)
    (three / "state.json").write_text("{}")
    load_weights(model, three)
    assert torch.equal(model.weight, WEIGHT)
    tensors, state = Checkpointer(three, 1).load(three, model)
    assert torch.equal(tensors["model"]["weight"], WEIGHT) and state == {}


def test_averages_take_the_place_of_weights_and_other_models_are_refused(three: Path) -> None:
    (three / "state.json").write_text("{}")
    write(three, 4, {"ema/weight": (-WEIGHT, [0, 0])})
    model = nn.Linear(3, 5, bias=False)
    load_weights(model, three)
    assert torch.equal(model.weight, -WEIGHT)
    load_weights(model, three, averaged=False)
    assert torch.equal(model.weight, WEIGHT)
    for other, output in (
        (nn.Linear(3, 5), "lacks 'bias'"), (nn.Linear(3, 4, bias=False), r"'weight' has shape \[5, 3\]"),
        (nn.Module(), "unexpected tensor 'weight'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=output):
            load_weights(other, three)


def test_weights_are_read_without_a_second_copy_of_the_model(tmp_path: Path) -> None:
    values = torch.arange(200_000.0).view(20, -1)
    for group in ("model", "ema"):
        for number, part in enumerate(values):
            write(tmp_path, len(list(tmp_path.iterdir())) + 1, {f"{group}/{number}": (part, [0])})
    (tmp_path / "state.json").write_text("{}")
    model = nn.ParameterList(torch.zeros_like(part) for part in values)
    with MemoryTracker() as watch:
        load_weights(model, tmp_path)
    assert watch.peak <= values.nbytes + 2 * values[0].nbytes
    assert all(torch.equal(p, part) for p, part in zip(model, values, strict=True))


DAMAGES = {
    "a file is missing": lambda folder: next(folder.glob("shard-00001-*")).unlink(),
    "a pickle": lambda folder: next(folder.glob("shard-00001-*")).write_bytes(b"\x80\x04pickle"),
    "far away": lambda folder: write(folder, 2, {"model/weight": (WEIGHT[3:], [10**15, 0])}),
    "before the beginning": lambda folder: [
        *(path.unlink() for path in folder.glob("shard-*")),
        write(folder, 1, {"model/weight": (WEIGHT, [-10, -6])}),
    ],
    "no number": lambda folder: write(folder, 2, {"model/weight": (WEIGHT[3:], ["a", 0])}),  # type: ignore[list-item]
    "another dimension": lambda folder: write(folder, 2, {"model/weight": (WEIGHT[3:], [3])}),
    "no positions": lambda folder: save_file(
        {"model/weight": WEIGHT}, folder / "shard-00002-model.safetensors", {"DCP_SHARDING_INFO": "{}"}
    ),
    "no JSON": lambda folder: save_file(
        {"model/weight": WEIGHT}, folder / "shard-00002-model.safetensors", {"DCP_SHARDING_INFO": "{"}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_mismatched_checkpoints_raise_one_sentence(damage: str, three: Path) -> None:
    DAMAGES[damage](three)
    with pytest.raises(UserError, match="lacks a part of '|cannot read") as caught:
        dcp_reader.read(three, None, {})
    assert "\n" not in str(caught.value)


def test_the_library_writes_what_is_read(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model/weight": WEIGHT, "rng/torch": torch.get_rng_state()}, storage_writer=writer, no_dist=True)
    assert dcp_reader.is_sharded(tmp_path)
    assert torch.equal(read_tensors(tmp_path, "model")["weight"], WEIGHT)
    assert torch.equal(read_tensors(tmp_path, "rng")["torch"], torch.get_rng_state())


def test_a_run_resumes_from_the_older_checkpoint_if_a_file_of_shards_was_added(three: Path, tmp_path: Path) -> None:
    """A copied file may have parts that no other has, so that reading them all would fail."""
    files, shards = Checkpointer(tmp_path / "run", 2), list(three.glob("shard-*"))
    for step in (1, 2):
        with files.create(step, {"step": step}, {}) as fresh:
            for shard in shards:
                shutil.copy(shard, fresh)
    older, newer = completed(tmp_path / "run")
    assert latest(tmp_path / "run") == newer
    (newer / "notes.txt").write_text("a file that nobody reads")
    assert latest(tmp_path / "run") == newer
    write(newer, 4, {"model/weight": (WEIGHT[:1], [0, 0])})
    with pytest.warns(
        UserWarning, match=r"step-00000002 is damaged \(shard-00004.* is not in SHA256SUMS\): using step-00000001"
    ):
        assert latest(tmp_path / "run") == older
    model = nn.Linear(3, 5, bias=False)
    with pytest.warns(UserWarning, match="using .* instead"):
        assert load_weights(model, tmp_path / "run") == older
    assert torch.equal(model.weight, WEIGHT)
    write(older, 4, {"model/weight": (WEIGHT[:1], [0, 0])})
    with pytest.raises(UserError, match="shard-00004.* is not in SHA256SUMS.* no older .* is intact: repair it"):
        latest(tmp_path / "run")
