"""Errors of a process that cannot continue, and the warnings that only the first process shows."""

import os
import socket
import warnings
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from limner.distributed.pipeline import Pipelined
from limner.distributed.powersgd import PowerSGD
from limner.distributed.process_group import Kind, PipelineSchedule, count_nodes, join_process_group, rank
from limner.distributed.sharded import Sharded
from limner.errors import UserError
from limner.models.dvae import DVAEConfig
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.objectives.elbo import RelaxedELB
from limner.training.parallel import SingleProcess
from limner.training.step import update
from limner.training.train_module import Trainable
from pipeline_ranks import batch, begin
from ranks import on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9", "another process .* has ended"),
        ("NCCL error: remote process exited or there was a network error", "another process of the run has ended"),
        (
            "[gloo/unbound_buffer.cc:78] Timed out waiting",
            "timed out waiting for its peers",
        ),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "timed out waiting for its peers"),
    ],
)
def test_the_end_of_another_process_is_reported(error: str, says: str) -> None:
    with pytest.raises(UserError, match=says), join_process_group():
        raise RuntimeError(error)


def test_an_empty_rank_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    assert rank() == 0
    with join_process_group() as parallel:
        assert parallel is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "")
    with pytest.raises(UserError, match="RANK is set, but MASTER_PORT is not"), join_process_group():
        pass


@pytest.mark.parametrize("error", ["gloo: invalid scalar type", "No backend type associated with CPU for NCCL"])
def test_an_error_of_its_own_keeps_its_name(error: str) -> None:
    with pytest.raises(RuntimeError, match=error), join_process_group():
        raise RuntimeError(error)


@pytest.mark.parametrize("kind", ["fsdp", "zero2"])
def test_one_remaining_machine_is_a_replica_and_resumes_with_its_error_buffers(kind: Kind) -> None:
    with join_process_group(kind, "per-node", PowerSGD) as parallel:
        assert isinstance(parallel, Sharded) and shape(parallel) == (1, 1)
        model = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=2, heads=2)
        parallel.prepare(Trainable(model.build(), Autoregressive()), torch.device("cpu"), torch.float32)
        assert len(parallel.reduction.error_buffers()) == 8


def test_one_replica_that_was_asked_for_has_nothing_to_send() -> None:
    with (
        pytest.raises(UserError, match="--grad-compression has no effect"),
        join_process_group("fsdp", 1, PowerSGD),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fsdp", 1, None, 2), "--pipeline-search need --parallel pipeline"),
        (("ddp", 1, None, None, "gpipe"), "--pipeline-search need --parallel pipeline"),
        (("ddp", 1, None, None, "1f1b", True), "--pipeline-search need --parallel pipeline"),
        (("pipeline", 2), "omit --dp-replicate, choose --pipeline-stages"),
        (("pipeline", 1, None, 2), "1 processes cannot be divided into pipelines of 2: choose --pipeline-stages"),
        (("pipeline", 1, PowerSGD), "one pipeline, so --grad-compression has no effect"),
    ],
)
def test_options_that_contradict_each_other_are_pointed_out(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UserError, match=says), join_process_group(*arguments):
        pass


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_a_pipeline_of_one_process_is_that_process(schedule: PipelineSchedule) -> None:
    with join_process_group("pipeline", pipeline_schedule=schedule) as parallel:
        assert isinstance(parallel, Pipelined) and parallel.layout.stages == parallel.layout.pieces == 1
        found, alone = begin(parallel, accumulate=2), begin(SingleProcess(), accumulate=2)
        for step in range(2):
            for run in (found, alone):
                update(run, batch(step, run.parallel))
            assert found.loss == pytest.approx(alone.loss, abs=1e-6)


def test_a_pipeline_trains_a_model_without_stages_as_replicas_do() -> None:
    dvae = DVAEConfig(size=16, width=8, groups=2, blocks=1, vocab=10, code_width=8).build()
    with join_process_group("pipeline") as parallel:
        wrapped = parallel.prepare(Trainable(dvae, RelaxedELB()), torch.device("cpu"), torch.float32)
        assert isinstance(wrapped, DistributedDataParallel)


def test_a_pipeline_does_not_lose_gradients_without_an_error() -> None:
    with join_process_group("pipeline") as parallel:
        run = begin(parallel)
        run.model.head.unused = torch.nn.Parameter(torch.zeros(1))  # pyright: ignore
        with pytest.raises(RuntimeError, match="the pipeline computed no gradient of head.unused"):
            update(run, batch(0, run.parallel))


def test_a_pipeline_does_not_scale_the_loss() -> None:
    with join_process_group("pipeline") as parallel:
        run = begin(parallel, scaling="loss")
        with pytest.raises(UserError, match="scaling loss does not work in a pipeline: choose resblocks, none, or"):
            update(run, batch(0, run.parallel))


def test_replicas_are_the_machines_of_this_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(on_ranks(4, shape_of_machines, 2)) == {(2, 2)}
    assert set(on_ranks(2, shape_of_machines, 2)) == {(1, 2)}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with (
        pytest.raises(UserError, match="cannot be equally many on each machine"),
        join_process_group("fsdp", "per-node"),
    ):
        pass


def shape_of_machines(processes: int) -> tuple[int, ...]:
    """Replicas and shards of a process that `torchrun` has started with so many on each machine."""
    os.environ |= {"WORLD_SIZE": str(distributed.get_world_size()), "LOCAL_WORLD_SIZE": str(processes)}
    return shape(Sharded(count_nodes()))


def shape(parallel: Sharded) -> tuple[int, int]:
    return parallel.replica_group.size(), parallel.mesh.size()


def test_the_first_process_warns() -> None:
    with pytest.warns(UserWarning, match="of all"), join_process_group():
        warnings.warn("of all", stacklevel=1)
