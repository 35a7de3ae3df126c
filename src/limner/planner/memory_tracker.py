"""Tracker of the bytes of live tensors and of the collectives of a process.

    with MemoryTracker() as tracker:
        ...
    tracker.peak, tracker.calls, tracker.sent

All torch operations pass a dispatch mode, on real and on fake tensors (shapes without values). A storage counts from
the operation that creates it until its last reference is gone. Sharding resizes storages outside of operations, but
always next to a collective, so collectives refresh all sizes. Workspace within an operation and memory cached by an
allocator are not counted.

torch's `MemTracker` measures the same peaks, but rejects a second forward pass, such as that of another micro-batch,
and does not count bytes sent.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from limner.compat import CollectiveOp, TorchDispatchMode, active_fake_mode, tree_leaves
from limner.optim.dtensor import to_local

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
# Names differ between torch's interfaces and versions: _allgather_base_, all_gather_into_tensor, reduce_scatter_tensor.
_COLLECTIVE_KINDS = {
    "allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "alltoall": "all-to-all",
    "send": "send",
}  # fmt: skip


class MemoryTracker(TorchDispatchMode):
    """Context manager that tracks memory and collectives.

    Attributes:
        current, peak: bytes of live tensors; `reset` starts a new peak.
        calls: number of calls, by collective.
        sent: bytes sent by this process, by collective. Among W processes, ring collectives send (W - 1) / W of the
            gathered or scattered bytes, an all-reduce twice that (Patarasuk & Yuan 2009).
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._sizes: dict[weakref.ref[Any], int] = {}
        self._fake_mode = active_fake_mode()

    def reset(self) -> None:
        """Reset the peak and the collectives, but not the live bytes."""
        self.peak = self.refresh()
        self.calls.clear()
        self.sent.clear()

    def refresh(self) -> int:
        """Re-read the sizes of all live storages, some of which were resized, and return their sum."""
        for ref, size in list(self._sizes.items()):
            storage = ref()
            if storage is not None and (real := storage.nbytes()) != size:
                self._sizes[ref] = real
                self.current += real - size
        self.peak = max(self.peak, self.current)
        return self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations are dispatched here
        if active_fake_mode() is not self._fake_mode:  # torch derives the shape of an unsharded result
            return func(*args, **(kwargs or {}))
        if func.namespace in _COLLECTIVE_NAMESPACES:
            self._count(func, args)
        if func.namespace in (*_COLLECTIVE_NAMESPACES, "fsdp"):
            self.refresh()
        result = self.execute(func, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                self._track(tensor)
        return result

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        ref = weakref.ref(storage, self._release)
        if ref not in self._sizes:
            self._sizes[ref] = storage.nbytes()
            self.current += storage.nbytes()
            self.peak = max(self.peak, self.current)

    def _release(self, ref: weakref.ref[Any]) -> None:
        self.current -= self._sizes.pop(ref, 0)

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.name().partition("::")[2].replace("_", "")
        kind = next((kind for part, kind in _COLLECTIVE_KINDS.items() if part in name), None)
        if kind is None:  # waiting, barriers
            return
        world_size = CollectiveOp.get_process_group(func, args).size()
        size = max(sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args)
        if kind == "all-gather" and func.namespace == "_c10d_functional":  # its argument is the shard
            size *= world_size
        self.calls[kind] += 1
        ring = (2 if kind == "all-reduce" else 1) * size * (world_size - 1) // world_size
        self.sent[kind] += size if kind == "send" else ring


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of this process's shards, each once."""
    storages = [to_local(t).untyped_storage() for t in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())
