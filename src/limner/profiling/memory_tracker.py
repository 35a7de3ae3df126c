"""What a process computes, watched from outside: bytes of tensors that are alive, and collectives that are called.

    with Watcher() as watch:
        ...
    watch.peak, watch.calls, watch.sent

Every operation of torch passes a dispatch mode, on real tensors and on fake ones, which have shapes but no values. A
storage counts from the operation that makes it until nothing holds it any more. Sharding resizes storages without an
operation, always next to a collective: there all sizes are read again. What an operation uses within itself is not
seen, nor what an allocator keeps.

Shapes: W processes of a group.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from limner.errors import UserError
from limner.optim.dtensor import to_local

_COLLECTIVES = ("c10d", "_c10d_functional")
# Names differ between torch's interfaces and versions: _allgather_base_, all_gather_into_tensor, reduce_scatter_tensor.
_KINDS = {
    "allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "alltoall": "all-to-all",
    "send": "send",
}  # fmt: skip


class Watcher(TorchDispatchMode):
    """Counts within its block.

    Attributes:
        now, peak: bytes alive; a step's peak needs `restart` before it.
        calls: how often each collective was called.
        sent: bytes that this process sent in each, if they go around a ring: (W - 1) / W of what is gathered or
            scattered, twice that of what is reduced to all (Patarasuk & Yuan 2009); and those it sent to one process.

    Raises `UserError` for a torch that is too old.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._sizes: dict[weakref.ref[Any], int] = {}
        self._propagator: Any = ShardingPropagator
        if not hasattr(self._propagator, "_fake_mode_lock"):
            raise UserError(f"torch {torch.__version__} does not tell what is memory of a process: take 2.13 or newer")
        self._shadows = _Shadows(self._propagator._fake_mode_lock)

    def __enter__(self) -> Self:
        self._propagator._fake_mode_lock = self._shadows
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._propagator._fake_mode_lock = self._shadows.before
        super().__exit__(*error)

    def restart(self) -> None:
        """Forget the peak and the collectives, not what is alive."""
        self.read()
        self.peak = self.now
        self.calls.clear()
        self.sent.clear()

    def read(self) -> int:
        """Bytes alive, storages that were resized included."""
        for ref, size in list(self._sizes.items()):
            storage = ref()
            if storage is not None and (real := storage.nbytes()) != size:
                self._sizes[ref] = real
                self.now += real - size
        self.peak = max(self.peak, self.now)
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operations on its shard, which come here
        if self._shadows.active:
            return func(*args, **(kwargs or {}))
        if func.namespace in _COLLECTIVES:
            self._count(func, args)
        if func.namespace in (*_COLLECTIVES, "fsdp"):
            self.read()
        found = self.answer(func, args, kwargs or {})
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                self._meet(tensor)
        return found

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation gives."""
        return func(*args, **kwargs)

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        ref = weakref.ref(storage, self._part)
        if ref not in self._sizes:
            self._sizes[ref] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _part(self, ref: weakref.ref[Any]) -> None:
        self.now -= self._sizes.pop(ref, 0)

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.name().partition("::")[2].replace("_", "")
        kind = next((said for part, said in _KINDS.items() if part in name), None)
        if kind is None:  # waiting, barriers
            return
        world = _world(args)
        size = max(sum(_nbytes(arg)) for arg in args)
        if kind == "all-gather" and func.namespace == "_c10d_functional":  # which is given the part alone
            size *= world
        self.calls[kind] += 1
        ring = (2 if kind == "all-reduce" else 1) * size * (world - 1) // world
        self.sent[kind] += size if kind == "send" else ring


class _Shadows:
    """Around what torch does on whole tensors without memory to learn the shape of an operation's result, for which it
    has a lock. That is nothing that a process holds."""

    def __init__(self, before: Any) -> None:
        self.before, self.active = before, False

    def __enter__(self) -> None:
        self.before.__enter__()
        self.active = True

    def __exit__(self, *error: Any) -> None:
        self.active = False
        self.before.__exit__(*error)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of this process's shards of them, each once."""
    found = [to_local(t).untyped_storage() for t in tensors]
    return sum({id(storage): storage.nbytes() for storage in found}.values())


def _nbytes(argument: Any) -> list[int]:
    return [leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)]


def _world(args: tuple[Any, ...]) -> int:
    """Of the group that a collective is called in: an object, or by name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return distributed.ProcessGroup.unbox(arg).size()  # pyright: ignore[reportAttributeAccessIssue]
            except RuntimeError:  # an operation of reduction
                continue
    return _resolve_process_group(args[-1]).size()
