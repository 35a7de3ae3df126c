"""Checkpoints that all processes of a run write together, in the background.

Each process writes its shards to a separate file; no tensor is gathered. Processes that hold the same tensors (for
example, weights of replicas) divide them so that each writes about the same number of bytes. The group "errors" differs
between replicas: the tensors of replica 2 become the group "errors.2". torch's Distributed Checkpoint writes the files;
`training/dcp_reader.py` describes and reads them.

    training    step  step  copy  step  step  step  step  copy  ...
                              └────────┐                    └─ waits for the thread, if it is still busy
    thread                             files · checksums · name

Training waits while a process copies its tensors to buffers in CPU memory, which are reused. A thread writes the
copies; the library assembles the file in the same amount of memory again. The first process creates the folder, and
renames it when the files of all processes are on the disk. A crash at any moment therefore leaves the old state or the
new one. If one process fails, all raise its error at the next save, or when they wait for the last one.

The threads use a separate gloo group, because training uses the default group meanwhile.
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
_PATIENCE = 60.0  # seconds for a network file system to show a new file


@runtime_checkable
class Folder(Protocol):
    """The checkpoints of a run; `training.checkpoint.Files` implements and describes the methods."""

    folder: Path

    def path(self, step: int) -> Path: ...

    def writing(self, step: int, state: Mapping[str, Any], sums: Mapping[str, str]) -> AbstractContextManager[Path]: ...

    def latest(self) -> Path | None: ...

    def load(self, where: Path, model: nn.Module) -> tuple[Tensors, dict[str, Any]]: ...

    def errors(self, where: Path, model: nn.Module, replicas: int, replica: int) -> Iterator[Mapping[str, Tensor]]: ...

    def begin(self) -> None: ...


class Shards:
    """A `Checkpointer` (`training/checkpoint.py`) in which each process of the default group writes a file.

    Args:
        files: the checkpoints of the run.
        replicas: number of processes that hold the same shards; this process has index `replica`.
    """

    def __init__(self, files: Folder, replicas: int = 1, replica: int = 0) -> None:
        self.files, self.rank = files, distributed.get_rank()
        self._holders = {True: (replicas, replica), False: (distributed.get_world_size(), self.rank)}
        self._group: Any = distributed.new_group(backend="gloo")
        self._copies: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path:
        """Copy the state, write it in the background, and return the path."""
        self.wait()
        self._copy(tensors)
        self._written = self._thread.submit(self._write, step, deepcopy(state))  # because training changes parts of it
        return self.files.path(step)

    def wait(self) -> None:
        """Wait until all processes have written the last save. Raises `UserError` if one fails."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def latest(self) -> Path | None:
        """Wait for the last save; return the newest undamaged checkpoint, found by rank 0."""
        self.wait()
        found = self._all(lambda: self.files.latest() if self.rank == 0 else None)[0]
        return self.files.folder / found.name if found else None

    def load(self, where: Path, model: nn.Module) -> tuple[Tensors, dict[str, Any]]:
        """See `Checkpointer`. Any number of processes may have saved; this process reads its shards."""
        return self.files.load(where, model)

    def errors(self, where: Path, model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
        """See `Checkpointer`."""
        return self.files.errors(where, model, *self._holders[True])

    def begin(self) -> None:
        """See `Checkpointer`. Raises `UserError` if processes do not see each other's files."""
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
        """Copy the tensors that this process writes to the CPU. A tensor goes to its holder with the fewest bytes.
        All processes see the same names in the same order and compute the same assignment."""
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
        """Write the copies, in the thread. Processes synchronize after each step, so that none waits for a failed one.

        The first process enters the block of `writing`; leaving it renames the folder, or removes it after an error.
        """
        from torch.distributed import checkpoint as dcp  # slow to import, and unused by a single process
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
        """Call `do` on all processes and return the results by rank. If it fails on one, all raise its error."""
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
    """Return the checksums of the files that a process has written, by name."""
    return {path.name: file_hash(path) for path in folder.glob(f"shard-{rank + 1:05d}-*")}


def _appears(path: Path) -> bool:
    """Return True if the path becomes visible to this process within `_PATIENCE` seconds."""
    deadline = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
