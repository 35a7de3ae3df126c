"""Runs that give the same bits again.

On a CPU they do: the same command with as many threads and processes gives the same weights. On GPUs some kernels add
in whatever order their threads arrive. Torch can do without most of them, more slowly, and refuses the others.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from limner.errors import UserError

_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """A block in which torch takes no kernel whose result depends on the order of threads.

    Raises `UserError` for an operation that has no other kernel.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's products begin
        torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        refused = _REFUSED.search(str(error))
        if not (wanted and refused):
            raise
        raise UserError(
            f"the operation {refused[1]} has no deterministic kernel on this device: leave --deterministic out"
        ) from None
    finally:
        torch.use_deterministic_algorithms(before)
