"""Checkpoints that all processes of a run write together, while training goes on.

What one process holds it writes itself, to a file of its own; nothing is gathered. What several hold alike (weights of
replicas, say) they divide, tensor by tensor, so that each writes about as much. Of the group "errors" each replica has
tensors of its own: those of replica 2 become the group "errors.2". Torch's Distributed Checkpoint writes the files;
`training/dcp_reader.py` describes and reads them.

    training    step  step  copy  step  step  step  step  copy  ...
                              └────────┐                    └─ waits for the thread, if that is not through
    thread                             files · checksums · name

Training waits while a process copies what it writes to the CPU's memory, in buffers that are kept; the library puts the
file together in as much again. A thread writes the copies. The first process makes the folder and gives it its name
when the files of all are on the disk. So a crash at any moment leaves the old state or the new one, and an error of one
process is one of all: they raise it at the next save, or when they wait for the last one.

The threads talk by a gloo group of their own, as the processes go on using theirs meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, distributed, nn

from limner.atomic_io import file_hash
from limner.errors import UserError
from limner.optim.dtensor import is_dtensor, to_local

T = TypeVar("T")
Tensors = Mapping[str, Mapping[str, Tensor]]
_PATIENCE = 60.0  # seconds until caches of a network file system have caught up


@runtime_checkable
class Folder(Protocol):
    """The checkpoints of a run, as one process sees them: `training.checkpoint.Files`, which describes the methods."""

    folder: Path

    def path(self, step: int) -> Path: ...

    def writing(self, step: int, state: Mapping[str, Any], sums: Mapping[str, str]) -> AbstractContextManager[Path]: ...

    def latest(self) -> Path | None: ...

    def load(self, where: Path, model: nn.Module) -> tuple[Tensors, dict[str, Any]]: ...

    def errors(self, where: Path, model: nn.Module, replicas: int, replica: int) -> Iterator[Mapping[str, Tensor]]: ...

    def begin(self) -> None: ...


class Shards:
    """Keeps states in files of all processes of the default group. For the methods see `training.Checkpointer`.

    Args:
        files: the run's.
        replicas: how many processes hold the same shards, of which this one is number `replica`.
    """

    def __init__(self, files: Folder, replicas: int = 1, replica: int = 0) -> None:
        self.files, self.rank = files, distributed.get_rank()
        self._holders = {True: (replicas, replica), False: (distributed.get_world_size(), self.rank)}
        self._group: Any = distributed.new_group(backend="gloo")
        self._copies: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path:
        """Copy the state and write the copy while training goes on; returns where it will be."""
        self.wait()
        self._copy(tensors)
        self._written = self._thread.submit(self._write, step, deepcopy(state))  # of which training changes parts
        return self.files.path(step)

    def wait(self) -> None:
        """Until all processes have written what was saved. Raises `UserError` if one cannot."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def latest(self) -> Path | None:
        """Where the newest undamaged state is, when what was saved is written; the first process looks."""
        self.wait()
        found = self._all(lambda: self.files.latest() if self.rank == 0 else None)[0]
        return self.files.folder / found.name if found else None

    def load(self, where: Path, model: nn.Module) -> tuple[Tensors, dict[str, Any]]:
        """What was saved, by however many processes; this process reads its shards."""
        return self.files.load(where, model)

    def errors(self, where: Path, model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
        """See `training.Checkpointer`."""
        return self.files.errors(where, model, *self._holders[True])

    def begin(self) -> None:
        """Take the run over. Raises `UserError` if processes do not see each other's files."""
        with ExitStack() as stack:

            def mark() -> str:
                if self.rank:
                    return ""
                self.files.begin()
                return Path(stack.enter_context(TemporaryDirectory(dir=self.files.folder))).name

            marked = self.files.folder / self._all(mark)[0]
            blind = [number for number, sees in enumerate(self._all(lambda: _appears(marked))) if not sees]
            if blind:
                raise UserError(
                    f"the folder {self.files.folder.parent} is not on a file system that all processes share: process "
                    f"{blind[0]} does not see what process 0 writes there; give the run a folder that is"
                )

    @torch.no_grad()
    def _copy(self, tensors: Tensors) -> None:
        """What this process writes, on the CPU. All processes have the same names in the same order, so that each knows
        which of them writes what: a tensor goes to the one of its holders that has the fewest bytes so far."""
        kept, self._copies = self._copies, {}
        bytes_of = {shared: [0] * count for shared, (count, _) in self._holders.items()}
        for group, values in tensors.items():
            own = f"errors.{self._holders[True][1]}" if group == "errors" else ""
            for name, value in values.items():
                totals = bytes_of[is_dtensor(value)]
                writer = totals.index(min(totals))
                if not own:
                    totals[writer] += value.nbytes
                    if writer != self._holders[is_dtensor(value)][1]:
                        continue
                key = f"{own or group}/{name}"
                copy = kept.get(key)
                if copy is None or (copy.shape, copy.dtype) != (value.shape, value.dtype):
                    copy = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
                to_local(copy).copy_(to_local(value))
                self._copies[key] = copy

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the copies, in the thread. Each step is one of all processes, so that none waits for one that failed.

        The block of `writing` is that of the first process; leaving it names the checkpoint, or removes what is there.
        """
        from torch.distributed import checkpoint as dcp  # slow to import, and no process alone needs it
        from torch.distributed.checkpoint.api import CheckpointException

        sums: dict[str, str] = {}
        try:
            with ExitStack() as stack:

                def begin() -> str:
                    return "" if self.rank else stack.enter_context(self.files.writing(step, state, sums)).name

                fresh = self.files.folder / self._all(begin)[0]
                writer = dcp.HuggingFaceStorageWriter(str(fresh), save_distributed=True)
                dcp.save(self._copies, storage_writer=writer, process_group=self._group)
                for own in self._all(lambda: _hashes(fresh, self.rank)):
                    sums |= own
                self._all(stack.close)
        except CheckpointException as error:
            number, (reason, _) = next(iter(error.failures.items()))
            raise self._unwritten(step, f"process {number} says {reason}") from error
        except OSError as error:
            raise self._unwritten(step, str(error)) from error

    def _unwritten(self, step: int, why: str) -> UserError:
        return UserError(f"the checkpoint {self.files.path(step)} cannot be written: {why}; earlier ones are intact")

    def _all(self, do: Callable[[], T]) -> list[T]:
        """What it gives on each process. If it fails on one, all raise its error."""
        found: tuple[T | None, Exception | None]
        try:
            found = do(), None
        except (OSError, UserError) as error:
            found = None, error
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, found, group=self._group)
        for _, error in everyone:
            if error is not None:
                raise error
        return [value for value, _ in everyone]


def _hashes(folder: Path, rank: int) -> dict[str, str]:
    """Checksums of the files that a process has written, by name."""
    return {path.name: file_hash(path) for path in folder.glob(f"shard-{rank + 1:05d}-*")}


def _appears(path: Path) -> bool:
    """Whether it can be seen from here before long."""
    deadline = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
