"""Models built in shards: no process ever holds all of one (Ramesh et al. 2021, §2.5: 24 GB of weights in 16 bits).

A constructor makes a parameter, gives it to its module, and draws its values, some of them twice. Here a parameter
becomes its shard as soon as a module is given it, so that what is drawn for it is drawn for a tensor of the whole size,
of which the shard is kept. All is drawn, in the order and on the device of one process, so that the values are those of
one process, bit for bit, and so is the state of the generator afterwards. At most one whole tensor is there at a time.

Models know nothing of it, and torch's modules neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from limner.optim.dtensor import is_dtensor, shard_like


@contextmanager
def in_shards(shard: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A block in which every parameter that a module is given becomes `shard(parameter)`, which processes share.
    Single numbers stay whole, and so do buffers."""

    def cut(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter | None:
        return nn.Parameter(shard(p.detach()), p.requires_grad) if p.ndim and not (is_dtensor(p) or p.is_meta) else None

    handle = register_module_parameter_registration_hook(cut)  # type: ignore[arg-type]
    try:
        with _Draws():
            yield
    finally:
        handle.remove()


@contextmanager
def cut_before(module: nn.Module, held: Callable[[Tensor], Tensor], whole: Iterable[Tensor]) -> Iterator[None]:
    """A block in which FSDP, which cuts parameters itself, is given some without memory. After it the module has what
    `held` gives of each: this process's shard, cut as FSDP has cut. Those that stay `whole` are left out."""
    these = set(module.parameters()) - set(whole)
    shards = {p: nn.Parameter(held(p.detach()), p.requires_grad) for p in module.parameters() if p in these}
    these.clear()
    of = {name: shards[p] for name, p in module.named_parameters(remove_duplicate=False) if p in shards}
    shards.clear()  # of what was whole
    empty = {p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad) for p in of.values()}
    module.load_state_dict({name: empty[p] for name, p in of.items()}, strict=False, assign=True)
    yield
    module.load_state_dict(of, strict=False, assign=True)


class _Draws(TorchDispatchMode):
    """Random numbers that fill a tensor in shards are drawn for all of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fills = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if not fills or not is_dtensor(args[0]):
            return func(*args, **(kwargs or {}))
        x = args[0]
        drawn = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        func(drawn, *args[1:], **(kwargs or {}))
        return x.copy_(shard_like(drawn, x))
