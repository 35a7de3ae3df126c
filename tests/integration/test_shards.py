"""Checkpoints of several processes: written by all while training continues, read by any number, whole after any kill.

The ranks are real ones (`ranks.py`); what they do is in `shard_ranks.py`.
"""

import random
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import shard_ranks
from checkpoints import read_tensors
from limner.errors import UserError
from limner.optim.dtensor import is_dtensor
from limner.training.checkpoint import completed, latest, load_weights, read_groups, read_state
from limner.training.dcp_reader import replica_groups
from limner.training.metrics_log import read_metrics
from ranks import at_work, on_ranks
from shard_ranks import EVERY, STEPS, build, learn, pass_on

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with half of the weights each."""
    out = tmp_path_factory.mktemp("halves")
    on_ranks(2, learn, out, 1)
    return out


def assert_equal(ours: Path, theirs: Path, but: tuple[str, ...] = ()) -> None:
    """All tensors, bit for bit, and what else a state has."""
    found, expected = (read_groups(path) | read_groups(path, replica_groups(path)) for path in (ours, theirs))
    for groups in (found, expected):
        for name in but:
            groups.pop(name, None)
    assert found.keys() == expected.keys()
    for group, tensors in expected.items():
        assert found[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[group][name].dtype == tensor.dtype
            assert torch.equal(found[group][name], tensor), (group, name)
    left, right = (read_state(path) for path in (ours, theirs))
    for state in (left, right):
        for name in ("seconds", "environment", "config"):
            state.pop(name)
    assert left == right


def losses(out: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(out / "metrics.jsonl")]


def test_every_rank_writes_its_part_and_one_process_reads_all(halves: Path) -> None:
    last = completed(halves)[-1]
    files = {path.name for path in last.iterdir()}
    shards = {f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)}
    assert files == shards | {"state.json", "SHA256SUMS"}  # nothing pickled
    groups = read_groups(last)
    assert set(groups) == {"model", "ema", "optimizer", "rng", "hook.Steps"}
    assert any(x.dtype == torch.int16 for x in groups["optimizer"].values())
    assert not any(is_dtensor(x) for group in groups.values() for x in group.values())
    model = build()
    assert load_weights(model, halves, averaged=False) == last
    assert all(torch.equal(p, groups["model"][name]) for name, p in model.named_parameters())
    load_weights(model, halves)
    assert all(torch.equal(p, groups["ema"][name]) for name, p in model.named_parameters())


def test_as_many_ranks_resume_bit_for_bit(halves: Path, tmp_path: Path) -> None:
    assert on_ranks(2, learn, tmp_path, 1, 5) == [(5, True)] * 2  # a signal reaches one of them
    assert [path.name for path in completed(tmp_path)] == ["step-00000004", "step-00000005"]
    on_ranks(2, learn, tmp_path, 1)
    assert losses(tmp_path) == losses(halves) and len(losses(halves)) == STEPS
    assert_equal(completed(tmp_path)[-1], completed(halves)[-1])


def test_training_continues_while_a_checkpoint_is_written(halves: Path, tmp_path: Path) -> None:
    on_ranks(2, learn, tmp_path, 1, 0, True)
    for ours, theirs in zip(completed(tmp_path), completed(halves), strict=True):  # as they were when they were saved
        assert_equal(ours, theirs)
    assert read_state(completed(tmp_path)[0])["hooks"]["Steps"]["steps"] == list(range(1, EVERY + 1))


@pytest.mark.filterwarnings("ignore:.*(results may differ|it is lost)")
def test_any_number_of_ranks_reads_what_another_wrote(tmp_path: Path) -> None:
    """4 -> 2 -> 1 -> 8 -> 2 -> 1: replicas of shards, shards, one process, shards, all weights on each, all in one."""
    began = tmp_path / "0"
    on_ranks(4, learn, began, 2)
    for i, (world, replicas) in enumerate([(2, 1), (1, -1), (8, 1), (2, 0), (1, 1)]):
        source, target = tmp_path / str(i), tmp_path / str(i + 1)
        if replicas < 0:
            pass_on(source, target, replicas)
        else:
            on_ranks(world, pass_on, source, target, replicas, seconds=300)
            sizes = [path.stat().st_size for path in completed(target)[-1].glob("shard-*")]
            assert len(sizes) == world and max(sizes) < 1.5 * min(sizes), sizes
        assert_equal(completed(target)[-1], completed(began)[-1], but=("rng", "errors.0", "errors.1"))


def test_error_buffers_resume_in_other_shards(tmp_path: Path) -> None:
    began, halved = tmp_path / "0", tmp_path / "1"
    on_ranks(4, learn, began, 2)
    for replica in range(2):
        assert any(x.any() for x in read_tensors(completed(began)[-1], f"errors.{replica}").values())
    on_ranks(2, pass_on, began, halved, 2)
    assert_equal(completed(halved)[-1], completed(began)[-1], but=("rng",))


@pytest.mark.parametrize(("world", "replicas"), [(2, "narrow"), (4, 2)])
def test_as_many_replicas_resume_bit_for_bit_after_a_kill(world: int, replicas: Any, tmp_path: Path) -> None:
    """Each with its own error buffers: from their mean, what follows is rounded otherwise."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    on_ranks(world, learn, whole, replicas)
    with at_work(world, shard_ranks.learn_and_die, killed, replicas) as (processes, _):
        processes[-1].join(120)
        assert processes[-1].exitcode == -signal.SIGKILL
    assert [path.name for path in completed(killed)] == ["step-00000004"]
    on_ranks(world, learn, killed, replicas)
    assert losses(killed) == losses(whole) and len(losses(whole)) == STEPS
    last = completed(killed)[-1]
    assert_equal(last, completed(whole)[-1])
    own, other = (read_tensors(last, f"errors.{replica}") for replica in range(2))
    assert all(x.dtype == (torch.int16 if replicas == "narrow" else torch.float32) for x in own.values())
    assert not any(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.filterwarnings("ignore:.*results may differ")
def test_another_number_of_replicas_resumes_from_the_mean_of_the_error_buffers(tmp_path: Path) -> None:
    began, target = tmp_path / "0", tmp_path / "1"
    on_ranks(4, learn, began, 2)
    on_ranks(4, pass_on, began, target, 4)
    first, second = (read_tensors(completed(began)[-1], f"errors.{replica}") for replica in range(2))
    last = completed(target)[-1]
    assert list(replica_groups(last)) == [f"errors.{replica}" for replica in range(4)]
    for replica in range(4):
        found = read_tensors(last, f"errors.{replica}")
        assert found.keys() == first.keys()
        assert all(torch.equal(x, (first[name] + second[name]) / 2) for name, x in found.items())


def test_a_rank_that_joins_draws_other_numbers_than_at_the_start(halves: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(halves, out)
    began, went_on = zip(*on_ranks(4, shard_ranks.draws, out), strict=True)
    for which in range(2):
        assert went_on[0][which] == began[0][which]  # this model draws nothing while it is trained
        assert len({numbers[which] for numbers in (*began, *went_on[2:])}) == 6


@pytest.mark.filterwarnings("ignore:.*results may differ")
def test_lost_error_buffers_are_reported(tmp_path: Path) -> None:
    began = tmp_path / "0"
    on_ranks(4, learn, began, 2)
    left = read_tensors(completed(began)[-1], "errors.0")
    with pytest.warns(UserWarning, match=f"drops the error buffers of {len(left)} matrices.* to keep them"):
        pass_on(began, tmp_path / "1", -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*results may differ")
        pass_on(tmp_path / "1", tmp_path / "2", -1)  # this checkpoint is without buffers


def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new(tmp_path: Path) -> None:
    chance, step = random.Random(1), 0
    for turn in range(6):
        with at_work(2, shard_ranks.save_on, tmp_path, step + 1) as (processes, _):
            deadline = time.monotonic() + 120
            while not any(int(path.name[5:]) > step for path in completed(tmp_path)):
                assert time.monotonic() < deadline and all(p.is_alive() for p in processes)
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.2))
            for process in processes if turn % 3 == 0 else [processes[turn % 3 - 1]]:
                process.kill()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a damaged one
            found = latest(tmp_path)
        assert found and read_state(found)["step"] > step
        step = read_state(found)["step"]
        assert all((x == step).all() for x in read_tensors(found, "model").values())


def test_samples_damaged_later_are_left_out(tmp_path: Path) -> None:
    on_ranks(2, learn, tmp_path, 1)
    good, damaged = completed(tmp_path)
    next(damaged.glob("shard-00001-*")).unlink()
    with pytest.warns(UserWarning, match="step-00000008 is damaged .*shard-00001.*using step-00000004 instead"):
        assert latest(tmp_path) == good
    with pytest.raises(UserError, match="lacks a part of"):
        read_groups(damaged)
    on_ranks(2, learn, tmp_path, 1)
    assert latest(tmp_path) == damaged


@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_fails_on_one_rank_is_reported_by_all_at_the_next_save(rank: int, tmp_path: Path) -> None:
    output = on_ranks(2, shard_ranks.fail, tmp_path, rank)
    assert output[0] == output[1]
    assert "/step-00000002: " in output[0] and "File too large" in output[0]
    assert output[0].endswith("; earlier checkpoints are intact") and "\n" not in output[0]


def test_folders_that_ranks_do_not_share_are_found_out_at_the_start(tmp_path: Path) -> None:
    for rank, output in enumerate(on_ranks(2, shard_ranks.apart, tmp_path)):
        assert f"the folder {tmp_path}/machine-{rank} is not shared by all processes" in output
    assert [path.name for path in (tmp_path / "machine-0/checkpoints").iterdir()] == ["start-00000001"]
