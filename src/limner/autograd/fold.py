"""An autograd graph folded by module, and its text.

A box is a module with all of its nodes, or one node of an opened module. Lists of modules are open. An edge between
boxes stands for all edges between their nodes, whose input numbers it keeps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from limner.autograd.graph import ACCUMULATE, AutogradGraph, GraphNode, SavedTensor, prefixes
from limner.errors import UserError, did_you_mean

__all__ = ["Box", "FoldedGraph", "fold"]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A folded module or a node.

    Attributes:
        module: dotted name of the module that is folded, or that the node belongs to.
        label: unique name: the module, or "MODULE/NODE" with "#2" for the second node of a name in a module.
        nodes: at least one.
        edges: target box and input number of each edge to another box, in the order of the nodes.
    """

    kind: Literal["module", "operation", "function", "parameter"]
    module: str
    label: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def title(self) -> str:
        """Name of the module; name of the node without its module, and its parameter."""
        if self.kind == "parameter":
            return f"{ACCUMULATE} {self.nodes[0].parameter}"
        return self.module if self.kind == "module" else self.label.rpartition("/")[2]

    def sizes(self) -> str:
        """Return what the box saves: "saves 1,234 bytes, 56 of parameters", "" for nothing."""
        counts = Counter[str]()
        for node in self.nodes:
            for saved in node.saved:
                counts[saved.owner] += saved.nbytes
        names = {"activation": "saves {:,} bytes", "recomputed": "recomputes {:,}", "parameter": "{:,} of parameters"}
        return ", ".join(text.format(counts[owner]) for owner, text in names.items() if counts[owner])


@dataclass(frozen=True, kw_only=True)
class FoldedGraph:
    """Boxes in the order of the forward pass, parameters last."""

    boxes: tuple[Box, ...]

    def text(self) -> str:
        """Return the graph as lines, indented by module: labels do not depend on other modules, so that texts of two
        graphs can be compared by `diff`."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        opened: list[str] = []
        for box in self.boxes:
            path = prefixes(box.module)[: -1 if box.kind == "module" else None]
            path = [module for module in path if module]
            for depth, module in enumerate(path):
                if module not in opened[depth : depth + 1]:
                    yield f"{'  ' * depth}{module}"
            opened = path
            indent = "  " * len(path)
            details = [box.sizes()] if box.kind == "module" else [*box.nodes[0].gradients[:1], box.nodes[0].source]
            if box.kind == "module":
                details.insert(0, f"{len(box.nodes)} nodes")
            yield f"{indent}{', '.join(filter(None, [box.title, *details]))}"
            for (target, input_nr), count in Counter(box.edges).items():
                times = f", {count} times" if count > 1 else ""
                yield f"{indent}    -> {self.boxes[target].label}, input {input_nr}{times}"
            if box.kind != "module":
                yield from (f"{indent}    saves {_describe(saved)}" for saved in box.nodes[0].saved)


def _describe(saved: SavedTensor) -> str:
    size = f"{saved.nbytes:,} bytes" if saved.nbytes else "saved before"
    return f"{saved.name} {list(saved.shape)} {saved.dtype}, {size}, {saved.owner}"


def fold(graph: AutogradGraph, opened: Iterable[str] = ()) -> FoldedGraph:
    """Fold a graph by module, except for the modules `opened` and those that contain them. Raises `UserError` for a
    module without nodes."""
    modules, is_open = graph.modules(), set(graph.containers)
    for name in opened:
        if name not in modules:
            raise UserError(f"no node of the graph is in a module {name!r}: {did_you_mean(name, sorted(modules))}")
        is_open.update(prefixes(name))
    keys: dict[tuple[str, int], int] = {}  # numbers of boxes
    box_of: list[int] = []
    for i, node in enumerate(graph.nodes):
        folded = next((module for module in prefixes(node.module) if module not in is_open), None)
        key = (node.module, i) if folded is None else (folded, -1)
        box_of.append(keys.setdefault(key, len(keys)))
    members = defaultdict[int, list[GraphNode]](list)
    edges = defaultdict[int, list[tuple[int, int]]](list)
    for node, box in zip(graph.nodes, box_of, strict=True):
        members[box].append(node)
        targets = ((box_of[edge.target], edge.input_nr) for edge in node.edges if edge)
        edges[box] += [edge for edge in targets if edge[0] != box]
    uses, boxes = Counter[str](), []
    for (module, number), box in keys.items():
        node = members[box][0]
        kind, label = "module", module
        if number >= 0:
            kind = "parameter" if node.name == ACCUMULATE else "function" if node.source else "operation"
            uses[label := f"{module}/{node.parameter.rpartition('.')[2] or node.name}"] += 1
            label += f"#{uses[label]}" if uses[label] > 1 else ""
        boxes.append(Box(kind=kind, module=module, label=label, nodes=tuple(members[box]), edges=tuple(edges[box])))
    return FoldedGraph(boxes=tuple(boxes))
