"""A first Triton kernel, which shows whether there can be others (`compile_elementwise.py`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def works() -> bool:
    """Compile and launch it. Raises whatever Triton, its C compiler or the driver has to say."""
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    launch: Any = probe_kernel[(1,)]
    launch(x)
    return int(x) == 1


@triton.jit
def probe_kernel(x):
    """Write 1."""
    tl.store(x, 1)
