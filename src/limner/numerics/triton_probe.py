"""A minimal Triton kernel, to test if Triton works on this machine (`compile_elementwise.py`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def works() -> bool:
    """Compile and launch the kernel. Errors of Triton, its C compiler and the driver propagate."""
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    launch: Any = probe_kernel[(1,)]
    launch(x)
    return int(x) == 1


@triton.jit
def probe_kernel(x):
    """Write 1."""
    tl.store(x, 1)
