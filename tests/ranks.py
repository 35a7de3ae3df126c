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
    ["limner.distributed.process_group", "limner.distributed.powersgd", "limner.models.dvae"]
)


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    """What `function(*arguments)` returns in each of the processes of one group; it lives in a module of the tests."""
    with at_work(ranks, function, *arguments, seconds=seconds) as (_, ends):
        found = [_received(end, seconds) for end in ends]
    if errors := [error for error, _ in found if error]:
        raise AssertionError("\n".join(errors))
    return [result for _, result in found]


def left_out(parallel: Any) -> dict[str, Tensor]:
    """What compression has left out of gradients, the mean over replicas, whole; {} of one process."""
    reduction = getattr(parallel, "_reduction", None)
    return {name: full_tensor(x) for name, x in reduction.mean_errors().items()} if reduction else {}


@contextmanager
def at_work(
    ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """The processes, which do not outlive the block, and where they tell what the function has returned."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [_context.Pipe(duplex=False) for _ in range(ranks)]
        what = seconds, _where(function), arguments
        processes = [
            _context.Process(target=_work, args=(f"{folder}/store", rank, ranks, send, *what))
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


def _where(function: Callable[..., Any]) -> tuple[str, str]:
    """Its file and name: modules of tests have no name to import them by."""
    return str(sys.modules[function.__module__].__file__), function.__name__


def _received(receive: Connection, seconds: float) -> tuple[str | None, Any]:
    try:
        return receive.recv() if receive.poll(seconds) else (f"no answer after {seconds} s", None)
    except EOFError:
        return "a process ended without an answer", None


def _work(
    store: str,
    rank: int,
    ranks: int,
    send: Connection,
    seconds: float,
    function: tuple[str, str],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these are processes of a CPU, also where there is a GPU
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        found = runpy.run_path(function[0])[function[1]](*arguments)
        send.send((None, found))
    except BaseException:
        send.send((f"process {rank}:\n{traceback.format_exc()}", None))
    send.close()
    time.sleep(seconds)  # until it is killed: others may still need it
