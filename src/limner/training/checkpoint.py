"""Checkpoints: folders of safetensors and JSON that appear complete or not at all.

    RUN/checkpoints/step-00001200/
        model.safetensors       parameters and persistent buffers, by name
        ema.safetensors         averaged parameters, if the run averages
        optimizer.safetensors   "exp_avg.NAME", "exp_avg_sq.NAME", "step.NAME" for each parameter (AdamW)
        rng.safetensors         states of the random generators, as bytes
        state.json              step, data position, schedule, counters, config, versions

A folder is written under a temporary name, flushed to the disk, and renamed: a crash at any moment
leaves either the old state or the new one. Older checkpoints go only after the new one has its
name. Nothing is pickled, so a checkpoint from a stranger can be wrong but cannot run code; names
and shapes are checked against the model that it is loaded into.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from limner.config import read_json
from limner.errors import UserError

FOLDER = "checkpoints"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")


def save(
    run: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and remove all but the last `keep`.

    Args:
        run: folder of the run.
        tensors: file name (without suffix) -> tensor name -> tensor.
        state: everything else, as JSON values.

    Raises:
        UserError: it cannot be written (a full disk, say); earlier checkpoints are untouched.
    """
    final = run / FOLDER / f"step-{step:08d}"
    temporary = final.with_suffix(".tmp")
    try:
        for stale in final.parent.glob("*.tmp"):  # of a process that was killed here
            shutil.rmtree(stale)
        temporary.mkdir(parents=True)
        for name, group in tensors.items():
            save_file(
                {k: t.detach().cpu().contiguous() for k, t in group.items()},
                temporary / f"{name}.safetensors",
            )
        (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        temporary.rename(final)
        _flush(final.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the checkpoint {final} cannot be written: {error}; earlier ones are intact") from None
    for old in completed(run)[:-keep]:
        doomed = old.rename(old.with_suffix(".tmp"))  # first, so that a half-removed folder has no good name
        shutil.rmtree(doomed, ignore_errors=True)
    return final


def completed(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = [p for p in (run / FOLDER).glob("step-*") if _NAME.fullmatch(p.name) and (p / STATE).is_file()]
    return sorted(folders, key=lambda p: int(p.name.removeprefix("step-")))


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(completed(run)), None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `state.json` holds."""
    return read_json(checkpoint / STATE, max_bytes=64 << 20)


def read_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU. Raises `UserError` if it is absent or damaged."""
    path = checkpoint / f"{name}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def load_weights(model: nn.Module, folder: str | Path, averaged: bool = True) -> Path:
    """Load the newest weights of a run (or those of one checkpoint folder) into `model`; returns
    the checkpoint.

    `averaged` takes the exponentially averaged parameters where the run kept them. Raises
    `UserError` if there is no checkpoint or it belongs to another model.
    """
    folder = Path(folder)
    checkpoint = folder if (folder / STATE).is_file() else latest(folder)
    if checkpoint is None:
        raise UserError(f"{folder} holds no checkpoint; name the folder of a training run")
    weights = read_tensors(checkpoint, "model")
    if averaged and (checkpoint / "ema.safetensors").is_file():
        weights |= read_tensors(checkpoint, "ema")
    load_model(model, weights, str(checkpoint))
    return checkpoint


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied tensor goes under its first name."""
    unique: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        unique.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in unique.values()}


@torch.no_grad()
def load_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors into the model after checking that names and shapes are exactly its own."""
    own = model_tensors(model)
    for name in dict.fromkeys([*own, *tensors]):
        if name not in tensors:
            raise UserError(f"{where} lacks {name!r}: it is of a model with another config")
        if name not in own:
            raise UserError(f"{where} has a {name!r} too many: it is of a model with another config")
        if own[name].shape != tensors[name].shape:
            there, here = list(tensors[name].shape), list(own[name].shape)
            raise UserError(f"{where} holds {name!r} with shape {there}, where the model has {here}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def optimizer_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimisers' state as "KEY.PARAMETER" -> tensor."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    states = (entry for optimizer in optimizers for entry in optimizer.state.items())
    return {f"{key}.{names[p]}": value for p, state in states for key, value in state.items()}


def load_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor], where: str
) -> None:
    """The inverse of `optimizer_tensors`; step sizes and decay stay as the optimisers were built."""
    parameters = dict(model.named_parameters())
    owner = {
        p: (optimizer, i)
        for optimizer in optimizers
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    states: dict[torch.optim.Optimizer, dict[int, dict[str, Tensor]]] = {optimizer: {} for optimizer in optimizers}
    for entry, tensor in tensors.items():
        key, _, name = entry.partition(".")
        p = parameters.get(name)
        if p is None or p not in owner or (tensor.ndim and tensor.shape != p.shape):
            raise UserError(f"{where} holds optimiser state {entry!r} that does not fit the model")
        optimizer, i = owner[p]
        states[optimizer].setdefault(i, {})[key] = tensor
    for optimizer, state in states.items():
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _flush(path: Path) -> None:
    """Have the operating system write a file or a folder's entries to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no handle for that
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
