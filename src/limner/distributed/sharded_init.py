"""Sharded construction: no process ever holds a whole model (Ramesh et al. 2021, §2.5: 24 GB of weights in 16 bits).

A constructor creates a parameter, registers it in its module, and draws its values, sometimes twice. Here a parameter
is replaced by its shard on registration. Later draws fill a temporary tensor of the full size, of which each process
keeps its shard. Every process draws all values in the same order and on the CPU, so that values and the final state of
the generator equal those of one process, bit for bit. At most one full tensor exists at a time.

Neither models nor torch's modules need changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from limner.compat import TorchDispatchMode
from limner.optim.dtensor import is_dtensor, shard_like


@contextmanager
def shard_on_registration(shard: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace every parameter that a module registers within the block by `shard(parameter)`. Scalars and buffers are
    not sharded."""

    def shard_parameter(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter | None:
        return nn.Parameter(shard(p.detach()), p.requires_grad) if p.ndim and not (is_dtensor(p) or p.is_meta) else None

    handle = register_module_parameter_registration_hook(shard_parameter)  # type: ignore[arg-type]
    try:
        with _ShardedInit():
            yield
    finally:
        handle.remove()


@contextmanager
def shard_in_place(module: nn.Module, shard: Callable[[Tensor], Tensor], ignored: Iterable[Tensor]) -> Iterator[None]:
    """Let FSDP shard parameters on the meta device within the block, without memory. Afterwards the module has the
    shard `shard(parameter)` of each, with the placement of FSDP. Parameters in `ignored` are unchanged."""
    full = set(module.parameters()) - set(ignored)
    shards = {p: nn.Parameter(shard(p.detach()), p.requires_grad) for p in module.parameters() if p in full}
    full.clear()
    new = {name: shards[p] for name, p in module.named_parameters(remove_duplicate=False) if p in shards}
    shards.clear()  # frees the full tensors
    empty = {p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad) for p in new.values()}
    module.load_state_dict({name: empty[p] for name, p in new.items()}, strict=False, assign=True)
    yield
    module.load_state_dict(new, strict=False, assign=True)


class _ShardedInit(TorchDispatchMode):
    """Draw random numbers that fill a sharded tensor for the full tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fills = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if not fills or not is_dtensor(args[0]):
            return func(*args, **(kwargs or {}))
        x = args[0]
        full = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        func(full, *args[1:], **(kwargs or {}))
        return x.copy_(shard_like(full, x))
