"""Set-up of the process group for processes that `torchrun` starts.

    torchrun --nproc-per-node 2 -m limner train DATA --recipe laptop --out RUN

`torchrun` sets the rank of each process in environment variables. On GPUs each process has one GPU and uses
NCCL; on CPUs processes use gloo. Without `torchrun` a run is a single process.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed

from limner.distributed.gradient_reducers import Bf16Reducer
from limner.distributed.pipeline_layout import PipelineLayout
from limner.distributed.powersgd import PowerSGD
from limner.distributed.rendezvous import agree_on_run_id
from limner.distributed.replicated import ReducerFactory, Replicated
from limner.distributed.torch_powersgd import TorchPowerSGD
from limner.errors import UserError

__all__ = ["REDUCERS", "count_nodes", "join_process_group", "rank"]

Kind = Literal["ddp", "fsdp", "zero2", "pipeline"]
PerNode = Literal["per-node"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]

#: Gradient reducers by the names of `--grad-compression`; None leaves the choice to `Parallel.grad_compression_rank`.
REDUCERS: dict[str, ReducerFactory | None] = {
    "recipe": None, "none": None, "bf16": Bf16Reducer, "powersgd": PowerSGD, "torch-powersgd": TorchPowerSGD,
}  # fmt: skip

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # timeout of a collective
CONNECT_TIMEOUT = 180.0  # seconds to wait for all processes; then the waiting ones must restart
INTERLEAVED_CHUNKS = 2  # pieces of the model on each stage of the interleaved schedule
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Messages of gloo and NCCL when another process has ended, or does not answer.
PEER_ENDED = re.compile("Connection (closed|reset)|Broken pipe|remote process exited|communicator was aborted")
PEER_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)


def rank() -> int:
    """Rank of this process; 0 without torchrun."""
    return int(os.environ.get("RANK") or 0)


@contextmanager
def join_process_group(
    kind: Kind = "ddp",
    replicas: int | PerNode = 1,
    make_reducer: ReducerFactory | None = None,
    pipeline_stages: int | None = None,
    pipeline_schedule: PipelineSchedule = "1f1b",
    pipeline_search: bool = False,
) -> Iterator[Replicated | None]:
    """Join the process group within the block and yield the strategy; yield None in a single process. Only the first
    rank shows warnings.

    Args:
        kind: "ddp" if each process holds all weights, "pipeline" if it holds some blocks, else the kind of sharding.
        replicas: number of replicas of sharded weights; "per-node" takes the number of machines at this start.
        make_reducer: constructor of a gradient reducer for each trained model (`Replicated`).
        pipeline_stages, pipeline_schedule: processes of a pipeline, by default all, and its schedule.
        pipeline_search: find the number of micro-batches by the times of the first updates.

    Raises `UserError` if the processes cannot connect, if another process has ended or does not answer, or if `kind`,
    `replicas` and the number of processes do not match.
    """
    if kind != "pipeline" and (pipeline_stages or pipeline_schedule != "1f1b" or pipeline_search):
        raise UserError("--pipeline-stages, --pipeline-schedule and --pipeline-search need --parallel pipeline")
    if not os.environ.get("RANK"):
        if kind != "ddp" or replicas != 1 or make_reducer:
            raise UserError("--parallel, --dp-replicate, --grad-compression need processes: start them with torchrun")
        yield None
        return
    if missing := [name for name in TORCHRUN_VARIABLES if not os.environ.get(name)]:
        raise UserError(f"RANK is set, but {', '.join(missing)} is not: start the processes with torchrun")
    _init_process_group()
    try:
        with warnings.catch_warnings(action="ignore") if rank() else nullcontext():
            if kind == "pipeline":
                yield _pipelined(replicas, make_reducer, pipeline_stages, pipeline_schedule, pipeline_search)
            else:
                yield _strategy(kind, replicas, make_reducer)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if PEER_ENDED.search(str(error)):
            summary = f"process {rank()} stops because another process of the run has ended: see the error of that one"
        elif PEER_TIMED_OUT.search(str(error)):
            summary = f"process {rank()} timed out waiting for its peers: restart the run"
        else:
            raise  # the error originates in this process
        raise UserError(f"{summary} ({reason})") from None
    finally:
        distributed.destroy_process_group()


def _pipelined(
    replicas: int | PerNode, make_reducer: ReducerFactory | None, stages: int | None, schedule: PipelineSchedule,
    search: bool,
) -> Replicated:  # fmt: skip
    # imported here because pipelines take half a second
    from limner.distributed.microbatch_search import MicrobatchCount, MicrobatchSearch
    from limner.distributed.pipeline import Pipelined

    world_size = distributed.get_world_size()
    stages = stages or world_size
    if replicas != 1:
        raise UserError(
            "--parallel pipeline makes each pipeline a replica: omit --dp-replicate, choose --pipeline-stages"
        )
    if world_size % stages:
        raise UserError(
            f"{world_size} processes cannot be divided into pipelines of {stages}: choose --pipeline-stages that "
            f"divides {world_size}"
        )
    if make_reducer and stages == world_size:
        raise UserError(
            "all processes together are one pipeline, so --grad-compression has no effect: choose fewer "
            "--pipeline-stages, or omit --grad-compression"
        )
    chunks = INTERLEAVED_CHUNKS if schedule == "interleaved" else 1
    layout = PipelineLayout(stages=stages, replicas=world_size // stages, chunks=chunks)
    order, make_count = "gpipe" if schedule == "gpipe" else "1f1b", MicrobatchSearch if search else MicrobatchCount
    return Pipelined(layout, order, make_reducer, make_count)


def _strategy(kind: Kind, replicas: int | PerNode, make_reducer: ReducerFactory | None) -> Replicated:
    if kind == "ddp":
        if replicas != 1:
            raise UserError("--parallel ddp makes each process a replica: omit --dp-replicate, or use fsdp or zero2")
        return Replicated(make_reducer)
    if replicas == 1 and make_reducer:
        raise UserError(
            "all processes together hold one replica, so --grad-compression has no effect: choose --dp-replicate 2 "
            "or more, or omit --grad-compression"
        )
    from limner.distributed.sharded import KINDS  # imported here because it takes half a second

    return KINDS[kind](count_nodes() if replicas == "per-node" else replicas, make_reducer)


def count_nodes() -> int:
    """Return the number of machines. Raises `UserError` if the local process count does not divide the total."""
    world_size, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not local or world_size % local:
        raise UserError(
            f"{world_size} processes, {local} of them on this machine, cannot be equally many on each machine: give "
            "torchrun the same --nproc-per-node everywhere, or --dp-replicate a number"
        )
    return world_size // local


def _init_process_group() -> None:
    """Join the process group under a name in the store that is unique to this start. Raises `UserError`."""
    number, world_size, local = rank(), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if on_gpus := torch.cuda.is_available():
        if local >= (gpus := torch.cuda.device_count()):
            raise UserError(
                f"process {local} lacks a GPU, because this machine has {gpus}: give torchrun --nproc-per-node {gpus}"
            )
        torch.cuda.set_device(local)
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    hosts = number == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limits: Any = {"world_size": world_size, "timeout": COLLECTIVE_TIMEOUT}
    try:
        store = distributed.TCPStore(address, int(port), is_master=hosts, **limits)
        run = distributed.PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", "run"), store)
        store = distributed.PrefixStore(agree_on_run_id(run, number, world_size, CONNECT_TIMEOUT), run)
        distributed.init_process_group("nccl" if on_gpus else "gloo", store=store, rank=number, **limits)
    except (RuntimeError, TimeoutError, ValueError) as error:  # DistStoreError, DistNetworkError and the like
        raise UserError(
            f"process {number} cannot reach its peers at {address}:{port}: {error}".splitlines()[0]
        ) from None
