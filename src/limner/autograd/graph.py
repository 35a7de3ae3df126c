"""The autograd graph of a loss as data.

A forward pass builds the graph that the backward pass executes (Saroufim et al., "How Computational Graphs are
Constructed in PyTorch"). A node is the derivative of an operation. Its edges lead to the nodes that take its results,
each with an input number: the output of that node's operation whose gradient it is. A parameter ends the graph in an
`AccumulateGrad`, which adds to its `grad`.

A node keeps tensors for the backward pass, which make up most of training's memory. `read_graph` counts the storage of
each once, at the first node that saves it, with its owner:

    parameter      in memory anyway
    activation     alive because the graph saves it
    recomputed     not in memory: checkpointing runs the module again in the backward pass

Sizes come from the hooks by which autograd packs tensors, since reading a saved tensor unpacks it, and under
checkpointing this recomputes. Sizes of recomputed tensors come from a second forward pass without checkpointing.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from limner import compat
from limner.autograd.module_trace import ModuleTrace
from limner.errors import UserError

__all__ = ["AutogradGraph", "Edge", "GraphNode", "SavedTensor", "prefixes", "read_graph"]

Owner = Literal["parameter", "activation", "recomputed"]
ACCUMULATE = "AccumulateGrad"
UNREACHED = "saved outside the graph"  # by nodes that no edge reaches, such as the inputs that checkpointing keeps


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that a node keeps for the backward pass.

    Attributes:
        name: torch's name in the node, such as "mat1".
        nbytes: of its storage; 0 if an earlier node saves the storage.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    owner: Owner


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The way of a gradient from one node to another, whose input `input_nr` it is.

    Attributes:
        target: number of the other node.
    """

    target: int
    input_nr: int


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """The derivative of an operation, or an `AccumulateGrad`.

    Attributes:
        name: torch's name, such as "AddmmBackward0", or the class of our function.
        module: dotted name of the module whose forward pass created the node, or that owns the parameter.
        source: file and line of our function, "" for operations of torch.
        parameter: dotted name of the parameter of an `AccumulateGrad`, "" for others.
        gradients: shape and format of the gradients that enter the node.
        edges: in the order of the operation's inputs; None for an input without gradient.
        saved: sorted by name.
    """

    name: str
    module: str
    source: str = ""
    parameter: str = ""
    gradients: tuple[str, ...] = ()
    edges: tuple[Edge | None, ...] = ()
    saved: tuple[SavedTensor, ...] = ()

    def nbytes(self, owner: Owner) -> int:
        """Return the bytes that the node saves and no earlier one."""
        return sum(x.nbytes for x in self.saved if x.owner == owner)


@dataclass(frozen=True, kw_only=True)
class AutogradGraph:
    """The nodes that a loss reaches: operations in the order of the forward pass, then parameters by name.

    Attributes:
        containers: dotted names of the model's lists of modules.
    """

    nodes: tuple[GraphNode, ...]
    containers: frozenset[str]

    def nbytes(self, owner: Owner) -> int:
        """Return the bytes of an owner that the graph saves, each storage once."""
        return sum(node.nbytes(owner) for node in self.nodes)

    def modules(self) -> set[str]:
        """Return the dotted names of all modules with nodes, and of the modules that contain them."""
        return {prefix for node in self.nodes for prefix in prefixes(node.module)}


def prefixes(module: str) -> list[str]:
    """Return the dotted names of a module and of those that contain it, the outermost first."""
    parts = module.split(".") if module else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class _Packed:
    """A saved tensor and the module that saved it. It is alive as long as a node that saves it is."""

    def __init__(self, tensor: Tensor, module: str) -> None:
        self.tensor, self.module = tensor, module


def read_graph(model: nn.Module, forward: Callable[[], Tensor]) -> AutogradGraph:
    """Return the autograd graph of the loss that `forward` computes with the model; run nothing backward.

    If the model uses checkpointing, `forward` is called twice and must compute the same operations. Raises `UserError`
    if the loss depends on no parameter.
    """
    nodes = _read(model, forward)
    if any(x.owner == "recomputed" for node in nodes for x in node.saved):
        model.set_checkpointing(False)  # type: ignore[operator]
        try:
            full = _read(model, forward)
        finally:
            model.set_checkpointing(True)  # type: ignore[operator]
        nodes = _with_recomputed(nodes, full)
    lists = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential))
    return AutogradGraph(nodes=tuple(nodes), containers=frozenset(lists))


def _read(model: nn.Module, forward: Callable[[], Tensor]) -> list[GraphNode]:
    """Return the nodes of a forward pass; recomputed tensors lack a shape."""
    packed = weakref.WeakSet[_Packed]()
    with ModuleTrace(model) as trace:

        def pack(tensor: Tensor) -> _Packed:
            packed.add(holder := _Packed(tensor, trace.current))
            return holder

        with saved_tensors_hooks(pack, lambda holder: holder.tensor):
            loss = forward()
    if loss.grad_fn is None:
        raise UserError("the loss cannot be differentiated: no parameter of the model requires a gradient")
    names = {p: name for name, p in model.named_parameters()}
    nodes = _in_order(loss.grad_fn, names)
    numbers = {node: i for i, node in enumerate(nodes)}
    storages = _Storages({p.untyped_storage().data_ptr() for p in names})
    result, reached = [], set[_Packed]()
    for node in nodes:
        holders = dict(compat.packed_tensors(node))
        reached |= {x for x in holders.values() if isinstance(x, _Packed)}
        variable = getattr(node, "variable", None)
        parameter = names.get(variable, "an input") if variable is not None else ""
        cls = compat.forward_class(node)
        result.append(
            GraphNode(
                name=cls.__name__ if cls else node.name().rpartition("::")[2],
                module=parameter.rpartition(".")[0] if parameter else trace.module_of(node),
                source=_source(cls) if cls else "",
                parameter=parameter,
                gradients=tuple(_describe(x) for x in compat.gradient_metadata(node)),
                edges=tuple(Edge(target=numbers[n], input_nr=i) if n else None for n, i in node.next_functions),
                saved=tuple(storages.saved(name, x) for name, x in sorted(holders.items())),
            )
        )
    rest = Counter[str]()
    for holder in sorted(packed - reached, key=lambda x: x.module):
        saved = storages.saved(f"input {rest[holder.module]}", holder)
        rest[holder.module] += 1
        result.append(GraphNode(name=UNREACHED, module=holder.module, saved=(saved,)))
    return result


def _in_order(root: Any, names: dict[Any, str]) -> list[Any]:
    """Return the nodes that a node reaches: those of operations by number, then those of parameters by name."""
    reached, pending = {root}, [root]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in reached:
                reached.add(node)
                pending.append(node)
    return sorted(reached, key=lambda node: (compat.sequence_nr(node), names.get(getattr(node, "variable", None), "")))


class _Storages:
    """Counts each storage once. `parameters` are the addresses of the parameters' storages."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters, self._counted = parameters, set[int]()

    def saved(self, name: str, packed: Any) -> SavedTensor:
        """Return the description of what autograd packed; other hooks than ours are those of checkpointing."""
        if not isinstance(packed, _Packed):
            return SavedTensor(name=name, shape=(), dtype="", nbytes=0, owner="recomputed")
        tensor, storage = packed.tensor, packed.tensor.untyped_storage()
        address = storage.data_ptr()
        nbytes = 0 if address in self._counted else storage.nbytes()
        self._counted.add(address)
        owner = "parameter" if address in self._parameters else "activation"
        return SavedTensor(name=name, shape=tuple(tensor.shape), dtype=_dtype(tensor), nbytes=nbytes, owner=owner)


def _with_recomputed(nodes: list[GraphNode], full: list[GraphNode]) -> Iterator[GraphNode]:
    """Yield the nodes of a pass with checkpointing, with the sizes of recomputed tensors from one without."""
    for node, twin in zip_longest(nodes, full, fillvalue=None):
        if node is None or (twin and twin.name != node.name) or (twin is None and node.name != UNREACHED):
            raise RuntimeError("the forward pass computes other operations without checkpointing")
        yield replace(node, saved=tuple(map(_recomputed, node.saved, twin.saved)) if twin else node.saved)


def _recomputed(saved: SavedTensor, full: SavedTensor) -> SavedTensor:
    if saved.owner != "recomputed":
        return saved
    return replace(full, owner="recomputed") if full.owner == "activation" else full


def _source(cls: type) -> str:
    """Return file and line of a class, the file from its package's folder on."""
    file = Path(inspect.getsourcefile(cls) or "")
    inner = cls.__module__.count(".")  # limner.quantization.low_precision -> quantization/low_precision.py
    return f"{Path(*file.parts[-max(inner, 1) :])}:{inspect.getsourcelines(cls)[1]}"


def _describe(x: Any) -> str:
    return f"{list(x.shape)} {_dtype(x)}"


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")
