"""Elementwise functions in one pass over memory.

A chain of tensor operations reads and writes memory once for each of them. `torch.compile` makes one loop of the chain:
for number formats six times as fast on one core. It takes some ten seconds the first time (torch keeps what it made on
disk) and 0.1 ms per call, so only large tensors are worth it. It needs a C++ compiler on a CPU, and Triton on a GPU.
Without, everything runs as it is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 17  # values from which compiled code is worth its call


class Fused:
    """`function`, compiled for large tensors; its first argument says how large. It must give the same if it is begun
    again, after a compilation that failed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._compiled: Callable[..., Any] | None = None
        self._works = True

    def __call__(self, first: Tensor, *others: Any) -> Any:
        if not self._works or not self.compiles(first):
            return self.function(first, *others)
        from torch._dynamo import config  # a second to import, so only now
        from torch._dynamo.exc import TorchDynamoException

        if self._compiled is None:
            self._compiled = torch.compile(self.function, dynamic=True)
        # Numbers of bits are constants; sizes of tensors are not.
        constants = any(isinstance(x, int) for x in others)
        try:
            with config.patch(specialize_int=True) if constants else nullcontext():
                return self._compiled(first, *others)
        except TorchDynamoException as error:  # no compiler, or one that does not work
            self._works = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"torch.compile does not work here ({reason}): number formats are slower", stacklevel=2)
            return self.function(first, *others)

    def compiles(self, x: Tensor) -> bool:
        """Whether a tensor is large enough, and on a device for which code can be made."""
        return self._works and x.numel() >= LARGE and x.device.type in ("cpu", "cuda")
