"""Elementwise functions compiled to one pass over memory, and tests for Triton.

`torch.compile` fuses a chain of tensor operations into one loop: for number formats six times as fast on one core. It
takes some ten seconds the first time (torch caches the code on disk) and 0.1 ms per call, so only large tensors are
worth it. It needs a C++ compiler on a CPU, and Triton on a GPU. Without them, functions run uncompiled.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from limner import compat
from limner.compat import FakeTensor, has_triton_package, unset_fake_temporarily

_MAX_VARIANTS = 64  # compiled variants of a function, by constants and kinds of tensors; torch's limit is 8
MIN_COMPILED_SIZE = 1 << 17  # values from which a call of compiled code pays


class CompiledElementwise:
    """`function`, compiled if its first argument is large. It must be safe to restart after a failed compilation, which
    warns and falls back to `function`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiled: Callable[..., Any] | None = None
        self.works = True

    def __call__(self, first: Tensor, *others: Any) -> Any:
        if not self.works or not self.compiles(first):
            return self.function(first, *others)
        if self.compiled is None:
            self.compiled = torch.compile(self.function, dynamic=True)
        try:
            with specialize_ints():
                return self.compiled(first, *others)
        except compat.TorchDynamoException as error:  # no compiler, or one that does not work
            self.works = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"torch.compile failed ({reason}): rounding to number formats runs more slowly", stacklevel=2)
            return self.function(first, *others)

    def compiles(self, x: Tensor) -> bool:
        """Return True if a tensor is large enough to compile for, and on a CPU or CUDA."""
        return self.works and x.numel() >= MIN_COMPILED_SIZE and x.device.type in ("cpu", "cuda")


def specialize_ints() -> AbstractContextManager[object]:
    """Context for calls of compiled functions: Python integers, such as numbers of bits, become constants of the code;
    sizes of tensors do not. With integers as variables, code is slower and may not compile on a GPU."""
    config = compat.dynamo_config
    return config.patch(specialize_int=True, recompile_limit=max(_MAX_VARIANTS, config.recompile_limit))


def triton_supports(x: Tensor) -> bool:
    """Return True if Triton's kernels can compute on this tensor, which may be fake: it is on a GPU, and Triton is
    installed and works."""
    return x.is_cuda and (has_triton_package() if torch.compiler.is_compiling() else triton_works())


def can_launch_triton(x: Tensor) -> bool:
    """Return True if eager code can launch a Triton kernel on this tensor: not fake, and outside `torch.compile`."""
    return x.is_cuda and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor) and triton_works()


@cache
def triton_works() -> bool:
    """Run a test kernel, since Triton needs a C compiler that some machines lack. Without a GPU, where CUDA tensors are
    fake, return True if Triton is installed."""
    if not has_triton_package() or not torch.cuda.is_available():
        return has_triton_package()
    try:
        from limner.numerics import triton_probe

        with unset_fake_temporarily():
            return triton_probe.works()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"Triton failed ({reason}): torch operations replace its kernels, more slowly", stacklevel=3)
        return False
