"""The drawing of a graph: well-formed, the same each time, small, without overlapping boxes."""

import re
import time
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest

from limner.autograd.fold import Box, FoldedGraph, fold
from limner.autograd.graph import GraphNode
from limner.autograd.svg import draw
from training_steps import CLIP, PRIOR, step

SVG = "{http://www.w3.org/2000/svg}"


def boxes_and_ends(svg):
    """Rectangles (x, y, width, height), and start and end of each edge."""
    root = ElementTree.fromstring(svg)
    shown = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") != "page"]
    rectangles = [tuple(float(rect.get(key)) for key in ("x", "y", "width", "height")) for rect in shown]
    numbers = [[float(x) for x in re.findall(r"-?\d+", path.get("d"))] for path in root.findall(f"{SVG}path")]
    return rectangles, [(x[:2], x[-2:]) for x in numbers]


@pytest.mark.parametrize(
    ("model", "opened"),
    [
        (PRIOR, ["blocks.0.attention.branch.row", "blocks.0.mlp.branch.up", "head"]),
        (CLIP, ["text_blocks.0.mlp.branch", "image_blocks.1.attention"]),
    ],
)
def test_boxes_do_not_overlap_and_edges_join_them(model, opened):
    graph = fold(step(model).graph(), opened)
    svg = draw(graph, "a step")
    assert svg == draw(fold(step(model).graph(), opened), "a step")
    rectangles, edges = boxes_and_ends(svg)
    assert len(rectangles) == len(graph.boxes)
    assert len(edges) == len({(i, target) for i, box in enumerate(graph.boxes) for target, _ in box.edges})
    for a, b in combinations(rectangles, 2):
        assert a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1]

    def touches(point, side):
        return any(abs(y + side * h - point[1]) <= 1 and x <= point[0] <= x + w for x, y, w, h in rectangles)

    assert all(touches(start, 1) and touches(end, 0) for start, end in edges)


def test_64_layers_are_drawn_within_5_seconds_and_300_kb():
    start = time.process_time()
    svg = draw(fold(step(replace(PRIOR, depth=64)).graph()), "64 layers")
    assert time.process_time() - start < 5
    assert len(svg.encode()) < 300_000
    assert svg.count('class="module"') == 64 + 2  # embed and head


def box(label, *edges):
    return Box(kind="module", module=label, label=label, nodes=(GraphNode(name="x", module=label),), edges=edges)


def test_modules_that_run_in_turns_are_drawn():
    """Each has edges to the other: one of them is drawn upwards."""
    rectangles, edges = boxes_and_ends(draw(FoldedGraph(boxes=(box("a", (1, 0)), box("b", (0, 0), (0, 2)))), ""))
    (a, b) = rectangles
    assert b[1] < a[1]
    assert {end[1] for _, end in edges} == {a[1], b[1] + b[3]}


def test_text_is_escaped():
    root = ElementTree.fromstring(draw(FoldedGraph(boxes=(box("a<b>&\"'"),)), "</title><script>"))
    assert root.find(f"{SVG}title").text == "</title><script>"
    assert "a<b>&\"'" in {element.text for element in root.iter(f"{SVG}tspan")}
    assert root.find(f".//{SVG}script") is None
