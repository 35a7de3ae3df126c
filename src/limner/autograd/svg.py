"""Drawing of a folded autograd graph as SVG, by layers (Sugiyama et al. 1981), without other programs.

The loss is at the top, and gradients flow down. The layer of a box is the length of the longest path from the loss to
it. Edges that skip layers pass these at reserved points, so no edge crosses a box. Sweeps order each layer by the
mean position of its neighbors, then move boxes above and below their neighbors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from statistics import mean

from limner.autograd.fold import Box, FoldedGraph
from limner.autograd.graph import ACCUMULATE

__all__ = ["draw"]

_LINE, _BOX_GAP, _LAYER_GAP, _MARGIN = 14, 18, 34, 20
_CHARACTER = 6.7  # width in pixels
_POINT_WIDTH = 8  # of an edge that passes a layer
_MAX_PORT_GAP = 36  # between the ends of edges at a box
_SWEEPS = 8
_STYLE = (
    "text{font:11px monospace;fill:#222}rect{stroke:#888;rx:4px}path{fill:none;stroke:#666}.n{font-size:9px;fill:#555}"
    ".module{fill:#e3ecf7}.operation{fill:#f6f6f6}.function{fill:#fde3c8}.parameter{fill:#dff0dc}.page{fill:#fff;stroke:none}"
)


def draw(graph: FoldedGraph, title: str) -> str:
    """Return the SVG of a graph. A box's tooltip lists its saved tensors; equal graphs give equal files."""
    layout = _Layout(graph.boxes)
    width, height = layout.size
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><title>{escape(title)}</title><style>{_STYLE}</style>'
        '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#666"/></marker></defs>'
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>'
    ]
    for (source, target), numbers in layout.edges.items():
        parts.append(layout.draw_edge(source, target, numbers))
    parts += [layout.draw_box(i, box) for i, box in enumerate(graph.boxes)]
    return "\n".join([*parts, "</svg>\n"])


def _lines(box: Box) -> list[str]:
    node = box.nodes[0]
    if box.kind == "module":
        details = [f"{len(box.nodes):,} nodes"]
    else:
        details = [node.source, *([] if box.kind == "parameter" else node.gradients[:1])]
    return [box.label if box.kind == "parameter" else box.title, *filter(None, [*details, *box.sizes().split(", ")])]


class _Layout:
    """Positions of boxes and edges. Vertices are boxes, then the points at which edges pass layers.

    Attributes:
        edges: input numbers by source and target box, without edges against the order of layers.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.lines = [_lines(box) for box in boxes]
        self.edges: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, box in enumerate(boxes):
            for target, input_nr in box.edges:
                self.edges[i, target].append(input_nr)
        self._widths: list[float] = [max(map(len, lines)) * _CHARACTER + 14 for lines in self.lines]
        self._rank(boxes)
        self._paths = {edge: self._path(*edge) for edge in self.edges}
        self._layers = [[v for v, rank in enumerate(self._ranks) if rank == r] for r in range(max(self._ranks) + 1)]
        self._neighbors: dict[int, list[int]] = defaultdict(list)
        for path in self._paths.values():
            for a, b in pairwise(path):
                self._neighbors[a].append(b)
                self._neighbors[b].append(a)
        self._x = [0.0] * len(self._widths)
        for layer in self._layers:
            self._place(layer, [0.0] * len(layer))
        for sweep in range(2 * _SWEEPS):
            for layer in self._layers if sweep % 2 == 0 else reversed(self._layers):
                self._align(layer, reorder=sweep < _SWEEPS)
        left = min(x - w / 2 for x, w in zip(self._x, self._widths, strict=True)) - _MARGIN
        self._x = [x - left for x in self._x]
        self._y = [float(_MARGIN)]
        for layer in self._layers:
            self._y.append(self._y[-1] + max(map(self._height, layer)) + _LAYER_GAP)
        self._ends = self._spread()

    @property
    def size(self) -> tuple[float, float]:
        right = max(x + w / 2 for x, w in zip(self._x, self._widths, strict=True))
        return right + _MARGIN, self._y[-1] - _LAYER_GAP + _MARGIN

    def _rank(self, boxes: Sequence[Box]) -> None:
        """Set the layers of boxes. A box is above those that the forward pass computes before it: a folded module that
        runs in several parts may have edges in both directions, of which one is drawn upwards."""
        order = {i: -1 if all(n.name == ACCUMULATE for n in box.nodes) else i for i, box in enumerate(boxes)}
        self._ranks = [0] * len(boxes)
        for i in sorted(order, key=lambda i: (-order[i], i)):
            for target, _ in boxes[i].edges:
                if order[target] < order[i]:
                    self._ranks[target] = max(self._ranks[target], self._ranks[i] + 1)

    def _path(self, source: int, target: int) -> list[int]:
        """Return the vertices of an edge; add a point in each layer that it passes."""
        first, last = self._ranks[source], self._ranks[target]
        between = list(range(first + 1, last) if first < last else range(first - 1, last, -1))
        points = list(range(len(self._ranks), len(self._ranks) + len(between)))
        self._ranks += between
        self._widths += [_POINT_WIDTH] * len(points)
        return [source, *points, target]

    def _align(self, layer: list[int], reorder: bool) -> None:
        """Move the vertices of a layer to the mean position of their neighbors, as far as the other vertices allow."""
        wanted = {v: mean(self._x[n] for n in self._neighbors[v]) if self._neighbors[v] else self._x[v] for v in layer}
        if reorder:
            layer.sort(key=wanted.__getitem__)
        self._place(layer, [wanted[v] for v in layer])

    def _place(self, layer: Sequence[int], wanted: Sequence[float]) -> None:
        """Place a layer in its order without overlap: the mean of a placement from the left and one from the right."""
        gaps = [(self._widths[a] + self._widths[b]) / 2 + _BOX_GAP for a, b in pairwise(layer)]
        left, right = list(wanted), list(wanted)
        for i, gap in enumerate(gaps):
            left[i + 1] = max(left[i + 1], left[i] + gap)
        for i, gap in reversed(list(enumerate(gaps))):
            right[i] = min(right[i], right[i + 1] - gap)
        for v, a, b in zip(layer, left, right, strict=True):
            self._x[v] = (a + b) / 2

    def _spread(self) -> dict[tuple[int, int], float]:
        """Return where edges end: spread over the width of the target, in the order of where they come from."""
        ends = {}
        for target in {target for _, target in self.edges}:
            arriving = sorted((e for e in self.edges if e[1] == target), key=lambda e: self._x[self._paths[e][-2]])
            gap = min(_MAX_PORT_GAP, (self._widths[target] - 12) / len(arriving))
            for i, edge in enumerate(arriving):
                ends[edge] = self._x[target] + (i - (len(arriving) - 1) / 2) * gap
        return ends

    def _height(self, vertex: int) -> float:
        return len(self.lines[vertex]) * _LINE + 8 if vertex < len(self.lines) else 0

    def draw_edge(self, source: int, target: int, numbers: Sequence[int]) -> str:
        """Return the path of an edge with its input numbers at the end."""
        path = self._paths[source, target]
        x = [*(self._x[v] for v in path[:-1]), self._ends[source, target]]
        y = [self._y[self._ranks[v]] for v in path]
        upwards = self._ranks[source] > self._ranks[target]
        y[0] += 0 if upwards else self._height(source)
        y[-1] += self._height(target) if upwards else 0
        d = f"M{x[0]:.0f} {y[0]:.0f}"
        for i in range(1, len(path)):
            bend = y[i] + (_LAYER_GAP if upwards else -_LAYER_GAP)  # below the boxes of the layer above, or the reverse
            middle = (y[i] + bend) / 2
            d += f"V{bend:.0f}C{x[i - 1]:.0f} {middle:.0f} {x[i]:.0f} {middle:.0f} {x[i]:.0f} {y[i]:.0f}"
        label = ",".join(map(str, sorted(set(numbers)))) + (f" ×{len(numbers)}" if len(numbers) > 1 else "")
        place = f'x="{x[-1] + 4:.0f}" y="{y[-1] - 5:.0f}"'
        return f'<path d="{d}" marker-end="url(#a)"/><text class="n" {place}>{label}</text>'

    def draw_box(self, number: int, box: Box) -> str:
        """Return a box with its lines of text and its tooltip."""
        width, height = self._widths[number], self._height(number)
        x, y = self._x[number] - width / 2, self._y[self._ranks[number]]
        saved = [f"{s.name} {list(s.shape)} {s.dtype}, {s.owner}" for node in box.nodes[:1] for s in node.saved]
        tooltip = "\n".join([box.label, *(saved if box.kind != "module" else [])])
        spans = "".join(f'<tspan x="{x + 7:.0f}" dy="{_LINE}">{escape(line)}</tspan>' for line in self.lines[number])
        return (
            f'<g><title>{escape(tooltip)}</title><rect class="{box.kind}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}"/><text y="{y + 1:.0f}">{spans}</text></g>'
        )
