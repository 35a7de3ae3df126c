"""Conversion of model and optimizer state to tensors by name, and back."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from limner.errors import UserError
from limner.optim.dtensor import shard_like


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a tied tensor has its first name."""
    unique: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        unique.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in unique.values()}


@torch.no_grad()
def fill_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors into the model. Raises `UserError` unless names and shapes match exactly."""
    targets = model_tensors(model)
    check_shapes(targets, {name: tensor.shape for name, tensor in tensors.items()}, where)
    for name, tensor in targets.items():
        tensor.copy_(shard_like(tensors[name], tensor))


def check_shapes(targets: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], where: str) -> None:
    """Raise `UserError` if `shapes`, found in `where`, do not match names and shapes of a model's tensors exactly."""
    for name in dict.fromkeys([*targets, *shapes]):
        if name not in shapes:
            raise UserError(f"{where} lacks {name!r}: it belongs to a model with another config")
        if name not in targets:
            raise UserError(f"unexpected tensor {name!r} in {where}: it belongs to a model with another config")
        if targets[name].shape != shapes[name]:
            shape, expected = list(shapes[name]), list(targets[name].shape)
            raise UserError(f"{name!r} has shape {shape} in {where}, but {expected} in the model")


def optimizer_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the state of the optimizers as "KEY.PARAMETER" -> tensor."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    states = (entry for optimizer in optimizers for entry in optimizer.state.items())
    return {f"{key}.{names[p]}": value for p, state in states for key, value in state.items()}


def load_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor], where: str
) -> None:
    """Load the result of `optimizer_tensors`, except learning rates and decay. Raises `UserError` on a mismatch."""
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
            raise UserError(f"the optimizer state {entry!r} in {where} does not fit the model")
        optimizer, i = owner[p]
        if tensor.ndim:  # in the parameter's own layout: fused kernels ignore strides
            tensor = torch.empty_like(p, dtype=tensor.dtype).copy_(shard_like(tensor, p))
        states[optimizer].setdefault(i, {})[key] = tensor
    for optimizer, state in states.items():
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
