"""Trackers of live tensor bytes and of collectives of a process, on real and on fake tensors (shapes without values).

    with MemoryTracker() as memory, CollectiveCounter() as collectives:
        ...
    memory.peak, collectives.calls, collectives.sent

Memory is tracked by torch. Collectives are counted here: torch's `CommDebugMode` counts neither bytes nor `send`, and
raises an error if a module is called twice (torch 2.11 to 2.13).

Shapes: W processes of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, Self

from torch import Tensor
from torch.distributed.tensor import DTensor

from limner.compat import CollectiveOp, MemTracker, TorchDispatchMode, tree_leaves
from limner.optim.dtensor import to_local

# Names differ between torch's interfaces and versions: _allgather_base_, all_gather_into_tensor, reduce_scatter_tensor.
_COLLECTIVE_KINDS = {
    "allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "alltoall": "all-to-all",
    "send": "send",
}  # fmt: skip


class MemoryTracker(MemTracker):
    """torch's tracker of live tensor bytes, without its statistics by module, which allow a single forward pass.

    Entering the context again starts a new peak. Workspace within an operation and memory cached by an allocator are
    not counted. DTensor propagates shapes at the first call of an operation; in an outer `FakeTensorMode`, and before
    torch 2.13, the unsharded shapes count as memory then. Measure a later step.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        self._mod_tracker.clear_user_hooks()
        return self

    @property
    def current(self) -> int:
        """Bytes of live tensors."""
        return self._total("current")

    @property
    def peak(self) -> int:
        """Maximum of `current` after an operation since the context was entered."""
        return self._total("peak")

    def _total(self, kind: Literal["current", "peak"]) -> int:
        snapshot = self.get_tracker_snapshot(kind)
        return sum(sizes["Total"] for device, sizes in snapshot.items() if device.type != "meta")


class CollectiveCounter(TorchDispatchMode):
    """Context manager that counts collectives.

    Attributes:
        calls: number of calls, by collective.
        sent: bytes sent by this process, by collective. Ring collectives send (W - 1) / W of the gathered or scattered
            bytes, an all-reduce twice that (Patarasuk & Yuan 2009).
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations are dispatched here
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].replace("_", "")
        kind = next((kind for part, kind in _COLLECTIVE_KINDS.items() if part in name), None)
        if kind is not None and func.namespace in ("c10d", "_c10d_functional"):
            size = max(sum(_nbytes(value)) for value in (*args, result))  # of the unsharded tensor
            world_size = CollectiveOp.get_process_group(func, args).size()
            ring = (2 if kind == "all-reduce" else 1) * size * (world_size - 1) // world_size
            self.calls[kind] += 1
            self.sent[kind] += size if kind == "send" else ring
        return result


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of this process's shards, each once."""
    storages = [to_local(t).untyped_storage() for t in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _nbytes(value: Any) -> list[int]:
    return [leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
