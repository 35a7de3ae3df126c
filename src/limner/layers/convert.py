"""The one way to change a model's linear layers: from outside, after initialisation.

Models use `nn.Linear` and know no other form. A layer that computes differently (`inference_linear.py`) replaces one of
them and takes over its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)
Where = Callable[[str, nn.Linear], bool]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def everywhere(name: str, layer: nn.Linear) -> bool:
    """All linear layers."""
    return True


def unhooked(name: str, layer: nn.Linear) -> bool:
    """Layers without hooks."""
    return not any(getattr(layer, kind) for kind in _HOOKS)


def convert(model: M, make: Callable[[nn.Linear], nn.Module], where: Where = everywhere) -> M:
    """Put `make(layer)` in the place of each linear layer, in place.

    Args:
        make: gives a layer's replacement, which may share its parameters.
        where: says of a layer, by its dotted name, whether it is replaced.

    Raises:
        ValueError: no layer is replaced; or one cannot be, since its class is not `nn.Linear` itself, or it or one of
            its parameters is also used elsewhere in the model, or it has hooks, which would be lost. The model is then
            as it was.
    """
    layers = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen = {name: x for name, x in layers.items() if isinstance(x, nn.Linear) and where(name, x)}
    if not chosen:
        raise ValueError(f"no linear layer of the {type(model).__name__} was chosen: there is nothing to convert")
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, layer in chosen.items():
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"{name} is a {type(layer).__name__}, and only a plain nn.Linear can be converted: leave it out with "
                "convert(..., where=lambda name, layer: ...)"
            )
        if any(uses[id(p)] > 1 for p in layer.parameters()):
            raise ValueError(
                f"{name} or its weight is used in several places: untie them, or leave it out with "
                "convert(..., where=lambda name, layer: ...)"
            )
        if not unhooked(name, layer):
            raise ValueError(f"{name} has hooks, which another layer in its place would not have: convert first")
    for name, layer in chosen.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, make(layer).train(layer.training))
    return model
