"""Functions that several gloo processes run together."""

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, distributed

from limner.optim.dtensor import full_tensor

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "limner.distributed.process_group",
        "limner.distributed.powersgd",
        "limner.models.dvae",
        "torch._dynamo",  # which optimizers import
        "torch.distributed.fsdp",
    ]
)


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    """Return the results of `function(*arguments)`, defined in a test module, by rank of a group of processes."""
    with at_work(ranks, function, *arguments, seconds=seconds) as (_, ends):
        results = [_receive(end, seconds) for end in ends]
    if errors := [error for error, _ in results if error]:
        raise AssertionError("\n".join(errors))
    return [result for _, result in results]


def left_out(parallel: Any) -> dict[str, Tensor]:
    """Return the mean of the error buffers over replicas, as full tensors; {} for one process."""
    buffers = getattr(parallel.reduction, "mean_error_buffers", dict)()
    return {name: full_tensor(x) for name, x in buffers.items()}


@contextmanager
def at_work(
    ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """Start processes that end with the block; yield them and the connections on which they send results."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [_context.Pipe(duplex=False) for _ in range(ranks)]
        shared_arguments = seconds, _source(function), arguments
        processes = [
            _context.Process(target=_run, args=(f"{folder}/store", rank, ranks, send, *shared_arguments))
            for rank, (_, send) in enumerate(ends)
        ]
        for process, (_, send) in zip(processes, ends, strict=True):
            process.start()
            send.close()
        try:
            yield list(processes), [receive for receive, _ in ends]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _source(function: Callable[..., Any]) -> tuple[str, str]:
    """Return file and name of a function: test modules cannot be imported by name."""
    return str(sys.modules[function.__module__].__file__), function.__name__


def _receive(receive: Connection, seconds: float) -> tuple[str | None, Any]:
    try:
        return receive.recv() if receive.poll(seconds) else (f"no result after {seconds} s", None)
    except EOFError:
        return "a process ended without a result", None


def _run(
    store: str,
    rank: int,
    ranks: int,
    send: Connection,
    seconds: float,
    function: tuple[str, str],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU even if there is a GPU
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        results = runpy.run_path(function[0])[function[1]](*arguments)
        send.send((None, results))
    except BaseException:
        send.send((f"process {rank}:\n{traceback.format_exc()}", None))
    send.close()
    time.sleep(seconds)  # until killed: other processes may still need it
