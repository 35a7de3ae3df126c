"""Bitwise reproducible runs.

On a CPU, the same command with the same numbers of threads and processes gives the same weights. On GPUs the order of
additions in some kernels depends on timing. torch replaces most of them by slower ones and raises errors for others.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from limner.errors import UserError

NONDETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Use only deterministic kernels of torch within the block, if `enabled`.

    Raises `UserError` if an operation lacks a deterministic kernel.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at initialization
        torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        match = NONDETERMINISTIC.search(str(error))
        if not (enabled and match):
            raise
        raise UserError(
            f"the operation {match[1]} lacks a deterministic kernel on this device: omit --deterministic"
        ) from None
    finally:
        torch.use_deterministic_algorithms(before)
