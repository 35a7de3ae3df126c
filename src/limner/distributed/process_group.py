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
from typing import Literal

import torch
from torch import distributed

from limner.distributed.gradient_reducers import Bf16Reducer
from limner.distributed.powersgd import PowerSGD
from limner.distributed.rendezvous import agreed
from limner.distributed.replicated import Make, Replicated
from limner.distributed.torch_powersgd import TorchPowerSGD
from limner.errors import UserError

Kind = Literal["replicated", "sharded", "zero2"]
Machines = Literal["machines"]

#: Gradient reducers by the names of `--reduce`; None averages in fp32.
REDUCERS: dict[str, Make | None] = {
    "plain": None, "bf16": Bf16Reducer, "powersgd": PowerSGD, "torch-powersgd": TorchPowerSGD,
}  # fmt: skip

_WAIT = timedelta(minutes=30)  # timeout of a collective
_MEETING = 180.0  # seconds to wait for all processes; then the waiting ones must restart
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Messages of gloo and NCCL when another process has ended, or does not answer.
_ENDED = re.compile("Connection (closed|reset)|Broken pipe|remote process exited|communicator was aborted")
_SILENT = re.compile("timed? ?out", re.IGNORECASE)


def rank() -> int:
    """Rank of this process; 0 without torchrun."""
    return int(os.environ.get("RANK") or 0)


@contextmanager
def joined(
    kind: Kind = "replicated", replicas: int | Machines = 1, make: Make | None = None
) -> Iterator[Replicated | None]:
    """Join the process group within the block and yield the strategy; yield None in a single process. Only the first
    rank shows warnings.

    Args:
        kind: "replicated" if each process holds all weights, else the kind of sharding.
        replicas: number of replicas of sharded weights; "machines" takes the number of machines at this start.
        make: constructor of a gradient reducer for each trained model; None averages in fp32.

    Raises `UserError` if the processes cannot connect, if another process has ended or does not answer, or if `kind`,
    `replicas` and the number of processes do not match.
    """
    if not os.environ.get("RANK"):
        if kind != "replicated" or replicas != 1 or make:
            raise UserError("there is one process, and nothing to share: start several with torchrun")
        yield None
        return
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        raise UserError(f"RANK is set and {', '.join(missing)} not: start the processes with torchrun")
    on_gpus = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    if on_gpus:
        if local >= torch.cuda.device_count():
            raise UserError(
                f"this machine has {torch.cuda.device_count()} GPUs and process {local} has none: give torchrun "
                f"--nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local)
    try:
        _meet("nccl" if on_gpus else "gloo")
    except (RuntimeError, TimeoutError, ValueError) as error:  # DistStoreError, DistNetworkError and the like
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(f"process {rank()} cannot meet the others at {where}: {error}".splitlines()[0]) from None
    quiet = warnings.catch_warnings(action="ignore") if rank() else nullcontext()
    try:
        if kind == "replicated" and replicas != 1:
            raise UserError("every process holds all weights: replicas are for --parallel sharded or zero2")
        if kind != "replicated" and replicas == 1 and make:
            raise UserError(
                "all processes hold one replica together, so no gradients travel between replicas: give --replicas 2 "
                "or more, or leave --reduce out"
            )
        if kind == "replicated":
            strategy: Replicated = Replicated(make)
        else:
            from limner.distributed.sharded import KINDS  # imported here because it takes half a second

            count = _machines() if replicas == "machines" else replicas
            strategy = KINDS[kind](count, make)
        with quiet:
            yield strategy
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if _ENDED.search(str(error)):
            why = f"another process of the run has ended, so process {rank()} ends, too: that one says why, if any does"
        elif _SILENT.search(str(error)):
            why = f"process {rank()} gets no answer of another one, which hangs or is cut off: start the run again"
        else:
            raise  # the error originates in this process
        raise UserError(f"{why} ({reason})") from None
    finally:
        distributed.destroy_process_group()


def _machines() -> int:
    """Return the number of machines. Raises `UserError` if the local process count does not divide the total."""
    world, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not here or world % here:
        raise UserError(
            f"{world} processes, of which this machine has {here}, are not as many on each machine: start them with "
            "torchrun and the same --nproc-per-node everywhere, or give --replicas a number"
        )
    return world // here


def _meet(backend: str) -> None:
    """Join the process group under a name in the store that is unique to this start."""
    number, world = rank(), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = number == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = distributed.TCPStore(address, port, world, is_master=hosts, timeout=_WAIT)
    run = distributed.PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", "run"), store)
    store = distributed.PrefixStore(agreed(run, number, world, _MEETING), run)
    distributed.init_process_group(backend, store=store, rank=number, world_size=world, timeout=_WAIT)
