"""Elementwise functions in one pass over memory, and whether Triton's kernels run.

A chain of tensor operations reads and writes memory once for each of them. `torch.compile` makes one loop of the chain:
for number formats six times as fast on one core. It takes some ten seconds the first time (torch keeps what it made on
disk) and 0.1 ms per call, so only large tensors are worth it. It needs a C++ compiler on a CPU, and Triton on a GPU.
Without, everything runs as it is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._triton import has_triton_package

_KINDS = 64  # of code for one function, for different constants and kinds of tensors; torch has 8
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
        from torch._dynamo.exc import TorchDynamoException  # a second to import, so only now

        if self._compiled is None:
            self._compiled = torch.compile(self.function, dynamic=True)
        try:
            with specialised():
                return self._compiled(first, *others)
        except TorchDynamoException as error:  # no compiler, or one that does not work
            self._works = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"torch.compile does not work here ({reason}): number formats are slower", stacklevel=2)
            return self.function(first, *others)

    def compiles(self, x: Tensor) -> bool:
        """Whether a tensor is large enough, and on a device for which code can be made."""
        return self._works and x.numel() >= LARGE and x.device.type in ("cpu", "cuda")


@contextmanager
def specialised() -> Iterator[None]:
    """While compiled functions are called: numbers in Python, of bits say, are constants of their code, and sizes of
    tensors are not. Code of which they are variables is slower, and on a GPU may not compile."""
    from torch._dynamo import config

    before = config.specialize_int, config.recompile_limit
    config.specialize_int, config.recompile_limit = True, max(_KINDS, config.recompile_limit)
    try:
        yield
    finally:
        config.specialize_int, config.recompile_limit = before


def triton_runs(x: Tensor) -> bool:
    """Whether Triton's kernels compute what concerns this tensor, which may be one without memory: it is on a GPU, and
    Triton is installed and works."""
    return x.is_cuda and (has_triton_package() if torch.compiler.is_compiling() else _triton_works())


def triton_launches(x: Tensor) -> bool:
    """Whether a kernel of Triton may be launched on this tensor here and now, from code that no compiler reads."""
    return x.is_cuda and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor) and _triton_works()


@cache
def _triton_works() -> bool:
    """Found out by a first kernel, since Triton needs a C compiler that not every machine has. Where there is no GPU,
    tensors of one have no memory, and it would work."""
    if not has_triton_package() or not torch.cuda.is_available():
        return has_triton_package()
    try:
        from limner.numerics import triton_probe

        with unset_fake_temporarily():
            return triton_probe.works()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"Triton does not work here ({reason}): what it would compute is slower", stacklevel=3)
        return False
