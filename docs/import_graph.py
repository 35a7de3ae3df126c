"""Draws docs/images/import_graph.svg, the rooms of limner and who imports whom: `python docs/import_graph.py`.

Rooms and their rows are those of `pyproject.toml`. A line goes from a room down to one that it imports, and is left
out where another road leads there: `cli` reaches `files` through the rooms between.
"""

import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
WIDTH, ROW, LEFT, HEIGHT, CHARACTER = 860, 58, 24, 28, 8.6  # pixels; of a row, a margin, a box, a letter


def rows() -> list[list[str]]:
    """The rooms that exist, the highest row first."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [[room for room in layer.split(" | ") if not room.startswith("(")] for layer in contract["layers"]]


def imports() -> dict[str, set[str]]:
    """For each room those that it imports and that no other road leads to."""
    graph, rooms = grimp.build_graph("limner"), {room for row in rows() for room in row}
    direct = {
        room: {
            other
            for other in rooms - {room}
            if graph.direct_import_exists(importer=f"limner.{room}", imported=f"limner.{other}", as_packages=True)
        }
        for room in rooms
    }

    def below(room: str) -> set[str]:
        return direct[room].union(*(below(other) for other in direct[room]))

    return {room: found - set().union(*(below(other) for other in found)) for room, found in direct.items()}


def svg() -> str:
    """The picture."""
    places: dict[str, tuple[float, float, float]] = {}  # left, top and width of each box
    for number, row in enumerate(rows()):
        for column, room in enumerate(row):
            width = CHARACTER * len(room) + 24
            centre = LEFT + (WIDTH - 2 * LEFT) * (column + 1) / (len(row) + 1)
            places[room] = centre - width / 2, 12 + number * ROW, width
    lines, boxes = [], []
    for room, found in sorted(imports().items()):
        for other in sorted(found):
            (a, top, wide), (b, bottom, narrow) = places[room], places[other]
            start, end = a + wide / 2, b + narrow / 2
            first, last = top + HEIGHT, bottom
            middle = (first + last) / 2
            curve = f"M{start:.0f} {first}C{start:.0f} {middle:.0f} {end:.0f} {middle:.0f} {end:.0f} {last}"
            lines.append(f'<path d="{curve}"/>')
    for room, (left, top, width) in places.items():
        boxes.append(f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{HEIGHT}" rx="5"/>')
        boxes.append(f'<text fill="#122" stroke="none" x="{left + width / 2:.0f}" y="{top + 19}">{room}</text>')
    height = 12 + len(rows()) * ROW - (ROW - HEIGHT) + 12
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            '<g fill="none" stroke="#8aa" stroke-width="1.2">',
            *lines,
            '</g><g fill="#eef4f4" stroke="#466" text-anchor="middle" font-family="monospace" font-size="14">',
            *boxes,
            "</g></svg>\n",
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs" / "images" / "import_graph.svg").write_text(svg())
