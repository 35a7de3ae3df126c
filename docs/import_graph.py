"""Draw docs/images/import_graph.svg, the packages of limner and their imports: `python docs/import_graph.py`.

Packages and their rows are those of `pyproject.toml`. A line goes from a package down to one that it imports. It
is left out if a longer path leads there, too.
"""

import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
WIDTH, ROW, LEFT, HEIGHT, CHARACTER = 860, 58, 24, 28, 8.6  # pixels; of a row, a margin, a box, a letter


def rows() -> list[list[str]]:
    """The existing packages, the highest row first."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [[package for package in layer.split(" | ") if not package.startswith("(")] for layer in contract["layers"]]


def imports() -> dict[str, set[str]]:
    """The imports of each package that do not follow from a longer path."""
    graph, packages = grimp.build_graph("limner"), {package for row in rows() for package in row}
    direct = {
        package: {
            other
            for other in packages - {package}
            if graph.direct_import_exists(importer=f"limner.{package}", imported=f"limner.{other}", as_packages=True)
        }
        for package in packages
    }

    def below(package: str) -> set[str]:
        return direct[package].union(*(below(other) for other in direct[package]))

    return {package: found - set().union(*(below(other) for other in found)) for package, found in direct.items()}


def svg() -> str:
    """The picture."""
    places: dict[str, tuple[float, float, float]] = {}  # left, top and width of each box
    for number, row in enumerate(rows()):
        for column, package in enumerate(row):
            width = CHARACTER * len(package) + 24
            centre = LEFT + (WIDTH - 2 * LEFT) * (column + 1) / (len(row) + 1)
            places[package] = centre - width / 2, 12 + number * ROW, width
    lines, boxes = [], []
    for package, found in sorted(imports().items()):
        for other in sorted(found):
            (a, top, wide), (b, bottom, narrow) = places[package], places[other]
            start, end = a + wide / 2, b + narrow / 2
            first, last = top + HEIGHT, bottom
            middle = (first + last) / 2
            curve = f"M{start:.0f} {first}C{start:.0f} {middle:.0f} {end:.0f} {middle:.0f} {end:.0f} {last}"
            lines.append(f'<path d="{curve}"/>')
    for package, (left, top, width) in places.items():
        boxes.append(f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{HEIGHT}" rx="5"/>')
        boxes.append(f'<text fill="#122" stroke="none" x="{left + width / 2:.0f}" y="{top + 19}">{package}</text>')
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
