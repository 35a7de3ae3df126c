"""Reader of sharded checkpoints, in which each process wrote a file (`distributed/sharded_checkpoint.py`).

    shard-00003-model-00001-of-00001.safetensors    of the third process: "GROUP/NAME" -> a part of the tensor
    "DCP_SHARDING_INFO" in its header, as JSON      "GROUP/NAME" -> offset of that part in the tensor

Format and file names are those of torch's Distributed Checkpoint (`HuggingFaceStorageWriter`) without an index file:
the headers of all files together list the parts of each tensor. Parts are read by offset, so the number of writing
processes does not matter, and each process reads only its shard. Reading works without a process group and
without unpickling.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from limner.errors import UserError
from limner.optim.dtensor import is_dtensor

REPLICA_GROUP = re.compile(r"errors\.\d{1,9}")  # a group written by a single replica
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def is_sharded(checkpoint: Path) -> bool:
    """Return True if the checkpoint is sharded."""
    return any(checkpoint.glob("shard-*.safetensors"))


def read(
    checkpoint: Path, wanted: Collection[str] | None, parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Return CPU tensors by group and name: the `wanted` groups that exist, or all but those of single replicas.

    Weights, averages and optimizer state of a sharded parameter are sharded like the parameter, those of a parameter on
    the meta device lack values; other tensors are whole. Raises `UserError` if a file is damaged or a part is missing.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for key, (shape, dtype) in stored(checkpoint).items():
        group, _, name = key.partition("/")
        if group not in wanted if wanted is not None else REPLICA_GROUP.fullmatch(group):
            continue
        p = parameters.get(parameter_name(group, name))
        with _readable(checkpoint):  # a damaged header may hold an invalid shape
            if p is not None and is_dtensor(p) and p.shape == shape:
                tensors[key] = torch.zeros_like(p.detach(), dtype=dtype, device="cpu")
            elif p is not None and p.is_meta:
                groups.setdefault(group, {})[name] = torch.empty(shape, dtype=dtype, device="meta")
                continue
            else:
                tensors[key] = torch.zeros(shape, dtype=dtype)
        groups.setdefault(group, {})[name] = tensors[key]
    fill(checkpoint, tensors)
    return groups


def replica_groups(checkpoint: Path) -> dict[str, list[str]]:
    """Return the names in each group of a single replica, in the order of replicas."""
    groups: dict[str, list[str]] = {}
    for key in stored(checkpoint) if is_sharded(checkpoint) else ():
        group, _, name = key.partition("/")
        if REPLICA_GROUP.fullmatch(group):
            groups.setdefault(group, []).append(name)
    return {group: groups[group] for group in sorted(groups, key=lambda group: int(group.partition(".")[2]))}


def stored(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each tensor by "GROUP/NAME". Raises `UserError` if a file is damaged or missing."""
    from torch.distributed import checkpoint as dcp  # slow to import, and rarely needed

    tensors = {}
    with _readable(checkpoint):
        metadata = dcp.HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
        for key, tensor in sorted(metadata.items()):
            assert isinstance(tensor, dcp.TensorStorageMetadata)
            # torch would silently keep the old values in place of a missing part.
            if sum(part.sizes.numel() for part in tensor.chunks) != tensor.size.numel():
                name = key.partition("/")[2]
                raise UserError(f"{checkpoint} lacks a part of {name!r}: restore its missing shard file")
            tensors[key] = tensor.size, tensor.properties.dtype
    return tensors


def fill(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read into tensors by key, with the shapes that `stored` returns. Raises `UserError` if a file is damaged."""
    from torch.distributed import checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(checkpoint))
    with _readable(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist is intended
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    """Convert errors while reading the checkpoint to `UserError`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = [str(reason) for reason, _ in error.failures.values()]
        raise UserError(f"cannot read {checkpoint}: {reasons[0]}") from None
    except (*ERRORS, SafetensorError) as error:
        raise UserError(f"cannot read {checkpoint}: {error!r}") from None


def parameter_name(group: str, name: str) -> str:
    """Return the name of the parameter that a tensor belongs to, or "". `state.py` describes the names."""
    if group == "optimizer" or group.startswith("hook."):
        return name.partition(".")[2]
    return name if group in ("model", "ema", "parallel") or REPLICA_GROUP.fullmatch(group) else ""
