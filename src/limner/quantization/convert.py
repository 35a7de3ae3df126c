"""Replacement of a model's linear layers, from outside and after initialization. Model code uses `nn.Linear` only."""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from torch import nn

__all__ = ["convert", "unhooked"]

M = TypeVar("M", bound=nn.Module)
LayerFilter = Callable[[str, nn.Linear], bool]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unhooked(name: str, layer: nn.Linear) -> bool:
    """Return True for layers without hooks."""
    return not any(getattr(layer, kind) for kind in _HOOKS)


def convert(model: M, make: Callable[[nn.Linear], nn.Module], where: LayerFilter = lambda name, layer: True) -> M:
    """Replace each linear layer by `make(layer)`, in place, and return the model.

    Args:
        make: returns a layer's replacement, which may share its parameters.
        where: returns True for layers to replace, by dotted name and layer. The default chooses all.

    Raises:
        ValueError: no layer is chosen; or a chosen layer is a subclass of `nn.Linear`, or it or a parameter of it has
            another use in the model, or it has hooks, which would be lost. The model is then unchanged.
    """
    layers = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen = {name: x for name, x in layers.items() if isinstance(x, nn.Linear) and where(name, x)}
    if not chosen:
        raise ValueError(f"`where` selects no linear layer of the {type(model).__name__}: check the names it accepts")
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    exclude = "exclude it with convert(..., where=lambda name, layer: ...)"
    for name, layer in chosen.items():
        if type(layer) is not nn.Linear:
            raise ValueError(f"{name} is a {type(layer).__name__}, not an nn.Linear: {exclude}")
        if any(uses[id(p)] > 1 for p in layer.parameters()):
            raise ValueError(f"{name} or its weight is used in several places: untie it, or {exclude}")
        if not unhooked(name, layer):
            raise ValueError(f"{name} has hooks, which its replacement would lose: convert before adding hooks")
    for name, layer in chosen.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, make(layer).train(layer.training))
    return model
