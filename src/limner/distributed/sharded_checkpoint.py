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
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from limner.atomic_io import file_hash
from limner.errors import UserError
from limner.optim.dtensor import is_dtensor, to_local
from limner.training.checkpoint import Checkpointer, Tensors, write_error
from limner.training.dcp_reader import parameter_name

T = TypeVar("T")
VISIBILITY_TIMEOUT = 60.0  # seconds for a network file system to show a new file


class ShardedCheckpointer(Checkpointer):
    """A `Checkpointer` in which each process of the default group writes a file.

    Args:
        files: the checkpoints of the run.
        replicas: number of processes that hold the same shards; this process has index `replica`.
    """

    def __init__(self, files: Checkpointer, replicas: int = 1, replica: int = 0) -> None:
        super().__init__(files.run, files.keep)
        self.files, self.rank = files, distributed.get_rank()
        self._replica = replicas, replica
        self._group: Any = distributed.new_group(backend="gloo")
        self._copies: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> Path:
        """Copy the state, write it in the background, and return the path."""
        self.flush()
        self._copy(tensors)
        self._pending = self._thread.submit(self._write, step, deepcopy(state))  # because training changes parts of it
        return self.path(step)

    def flush(self) -> None:
        """Wait until all processes have written the last save."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> Path | None:
        """Wait for the last save; return the newest undamaged checkpoint, found by rank 0."""
        self.flush()
        newest = self._all_gather(lambda: self.files.latest() if self.rank == 0 else None)[0]
        return self.folder / newest.name if newest else None

    def error_buffers(self, checkpoint: Path, model: nn.Module, *_: int) -> Iterator[Mapping[str, Tensor]]:
        return super().error_buffers(checkpoint, model, *self.replica())

    def replica(self) -> tuple[int, int]:
        """Return the number of processes that hold the same parts of tensors, and the index of this one."""
        return self._replica

    def is_part(self, parameter: str, value: Tensor) -> bool:
        """Return True if only the processes of the replica group hold the value, a tensor of a parameter or of ""."""
        return is_dtensor(value)

    def acquire(self) -> None:
        """Raises `UserError` if processes do not see each other's files."""
        with ExitStack() as stack:

            def mark() -> str:
                if self.rank:
                    return ""
                self.files.acquire()
                return Path(stack.enter_context(TemporaryDirectory(dir=self.folder))).name

            marked = self.folder / self._all_gather(mark)[0]
            seen = self._all_gather(lambda: _appears(marked))
            if not all(seen):
                raise UserError(
                    f"the folder {self.run} is not shared by all processes: process "
                    f"{seen.index(False)} does not see the files of process 0; choose a folder on a shared file system"
                )

    @torch.no_grad()
    def _copy(self, tensors: Tensors) -> None:
        """Copy the tensors that this process writes to the CPU. A tensor goes to its holder with the fewest bytes.
        The holders of a tensor have the same names and compute the same assignment."""
        reusable, self._copies = self._copies, {}
        holders = {True: self.replica(), False: (distributed.get_world_size(), self.rank)}
        bytes_of = {part: [0] * count for part, (count, _) in holders.items()}
        for group, values in tensors.items():
            replica_group = f"errors.{self.replica()[1]}" if group == "errors" else ""
            for name, value in sorted(values.items()):
                if value.is_meta:  # of another stage of a pipeline
                    continue
                part = self.is_part(parameter_name(group, name), value)
                totals, (_, holder) = bytes_of[part], holders[part]
                writer = totals.index(min(totals))
                if not replica_group:
                    totals[writer] += value.nbytes
                    if writer != holder:
                        continue
                key = f"{replica_group or group}/{name}"
                copy = reusable.get(key)
                if copy is None or (copy.shape, copy.dtype) != (value.shape, value.dtype):
                    copy = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
                to_local(copy).copy_(to_local(value))
                self._copies[key] = copy

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the copies, in the thread. Processes synchronize after each step, so that none waits for a failed one.

        The first process enters the block of `create`, whose end renames the folder, or removes it on errors.
        """
        from torch.distributed import checkpoint as dcp  # slow to import, and unused by a single process
        from torch.distributed.checkpoint.api import CheckpointException

        sums: dict[str, str] = {}
        try:
            with ExitStack() as stack:

                def begin() -> str:
                    return "" if self.rank else stack.enter_context(self.files.create(step, state, sums)).name

                folder = self.folder / self._all_gather(begin)[0]
                writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
                dcp.save(self._copies, storage_writer=writer, process_group=self._group)
                pattern = f"shard-{self.rank + 1:05d}-*"
                for hashes in self._all_gather(lambda: {p.name: file_hash(p) for p in folder.glob(pattern)}):
                    sums |= hashes
                self._all_gather(stack.close)
        except CheckpointException as error:
            number, (reason, _) = next(iter(error.failures.items()))
            raise write_error(self.path(step), f"process {number}: {reason}") from error
        except OSError as error:
            raise write_error(self.path(step), error) from error

    def _all_gather(self, function: Callable[[], T]) -> list[T]:
        """Call `function` on all processes and return the results by rank. If it fails on one, all raise its error."""
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = function(), None
        except (OSError, UserError) as error:
            outcome = None, error
        outcomes: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(outcomes, outcome, group=self._group)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [value for value, _ in outcomes]


def _appears(path: Path) -> bool:
    """Return True if the path becomes visible to this process within `VISIBILITY_TIMEOUT` seconds."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
