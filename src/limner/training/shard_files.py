"""Reads checkpoints that several processes wrote, each a file with its shards (`distributed/checkpoints.py`).

    shard-00003-model-00001-of-00001.safetensors    of the third: "GROUP/NAME" -> a part of the tensor
    "DCP_SHARDING_INFO" in its header, as JSON      "GROUP/NAME" -> where in the tensor that part begins

Format and file names are those of torch's Distributed Checkpoint (`HuggingFaceStorageWriter`), which has no further
index: the headers of all files together say of which parts a tensor consists. It reads them by these positions, so that
the number of processes that wrote does not matter, and so that a process which holds a shard reads no more than that.
Reading takes no process group and unpickles nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from limner.errors import UserError
from limner.optim.shards import sharded

_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def found(checkpoint: Path) -> bool:
    """Whether it is in shards."""
    return any(checkpoint.glob("shard-*.safetensors"))


def read(
    checkpoint: Path, wanted: Collection[str] | None, parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Tensors by group and name, on the CPU; the `wanted` groups that are there, or all.

    Weights, averages and optimiser state of a parameter that processes share are shared in the same way, all others
    are whole. Raises `UserError` if a file is damaged or a part is missing.
    """
    from torch.distributed import checkpoint as dcp  # slow to import, and few need it
    from torch.distributed.checkpoint.api import CheckpointException

    reader = dcp.HuggingFaceStorageReader(str(checkpoint))
    tensors: dict[str, Tensor] = {}
    try:
        for key, stored in sorted(reader.read_metadata().state_dict_metadata.items()):
            group, _, name = key.partition("/")
            if wanted is not None and group not in wanted:
                continue
            assert isinstance(stored, dcp.TensorStorageMetadata)
            # Torch would leave zeros in the place of a part that is missing, without a word.
            if sum(part.sizes.numel() for part in stored.chunks) != stored.size.numel():
                raise UserError(f"{checkpoint} lacks a part of {name!r}: a file of shards is missing")
            p = parameters.get(_parameter(group, name))
            dtype = stored.properties.dtype
            if p is not None and sharded(p) and p.shape == stored.size:
                tensors[key] = torch.zeros_like(p.detach(), dtype=dtype, device="cpu")
            else:
                tensors[key] = torch.zeros(stored.size, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is not asked
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        reasons = [str(reason) for reason, _ in error.failures.values()]
        raise UserError(f"{checkpoint} cannot be read: {reasons[0]}") from None
    except (*_ERRORS, SafetensorError) as error:
        raise UserError(f"{checkpoint} cannot be read: {error!r}") from None
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups


def _parameter(group: str, name: str) -> str:
    """The name of the parameter that a tensor belongs to; "" if it belongs to none. See `state.py` for the names."""
    if group == "optimizer":
        return name.partition(".")[2]
    return name if group in ("model", "ema", "parallel") else ""
