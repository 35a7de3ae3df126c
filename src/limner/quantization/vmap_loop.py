"""`torch.func.vmap` for custom operations, which it cannot trace.

The products and quantizers of low-precision layers are custom operations, since the choice and the count of a kernel
at run time must not be traced. `vmap` runs such an operation once for each element of the batch.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

Op = TypeVar("Op", bound=Any)


def vmap_by_loop(op: Op) -> Op:
    """Register a loop as the `vmap` rule of a custom operation, and return the operation. Results are stacked along
    dimension 0."""

    def call_each(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def element(i: int) -> list[Any]:
            return [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)]

        results = [op(*element(i)) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])

    torch.library.register_vmap(op, call_each)
    return op
