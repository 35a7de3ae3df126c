"""Draw docs/images/patterns.svg, the attention patterns: `python docs/patterns.py`.

Above are the masks of Figure 11 of Ramesh et al. 2021, for 6 text tokens and 4 x 4 image tokens: the token of a row
attends to the colored columns. Below, for one token of an 8 x 8 image, are the image tokens to which it attends.
"""

from pathlib import Path

from limner.attention.attention import attention_mask
from limner.attention.patterns import column, conv, dense, row

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = {"row": row, "column": column, "convolutional, 3 × 3": lambda grid: conv(grid, 3), "dense": dense}
TEXT, GRID, LARGE, TOKEN = 6, (4, 4), (8, 8), 44  # token of the large grid: row 5, column 4
PANEL, TOP, SIDE, GAP = 210, 30, 180, 22  # pixels
COLORS = {"text": "#9db8d9", "image": "#f0a35e", "itself": "#c2410c", "hidden": "#f1f3f5"}


def mask_cells(pattern) -> list[list[str]]:
    """The color of each query and key of the small grid."""
    mask = attention_mask(pattern(GRID), TEXT)
    return [
        [("itself" if i == j else "text" if j < TEXT else "image") if seen else "hidden" for j, seen in enumerate(keys)]
        for i, keys in enumerate(mask.tolist())
    ]


def grid_cells(pattern) -> list[list[str]]:
    """The color of each token of the large grid."""
    visible = attention_mask(pattern(LARGE), 0)[TOKEN].tolist()
    cells = ["itself" if i == TOKEN else "image" if seen else "hidden" for i, seen in enumerate(visible)]
    return [cells[start : start + LARGE[1]] for start in range(0, len(cells), LARGE[1])]


def squares(cells: list[list[str]], left: float, top: float) -> list[str]:
    """A square of the color `hidden`, and one path for all cells of another color."""
    size = SIDE / len(cells)
    side, paths = f"{size - 1:.1f}", dict.fromkeys(COLORS, "")
    paths["hidden"] = f"M{left} {top}h{SIDE}v{SIDE}h-{SIDE}z"
    for i, line in enumerate(cells):
        for j, color in enumerate(line):
            if color != "hidden":
                paths[color] += f"M{left + j * size:.1f} {top + i * size:.1f}h{side}v{side}h-{side}z"
    return [f'<path fill="{COLORS[color]}" d="{paths[color]}"/>' for color in reversed(COLORS) if paths[color]]


def svg() -> str:
    """The picture."""
    width, height = PANEL * len(PATTERNS) + 20, TOP + 2 * SIDE + GAP + 46
    parts = []
    for number, (name, pattern) in enumerate(PATTERNS.items()):
        left = 20 + number * PANEL
        parts.append(f'<text x="{left}" y="{TOP - 10}">{name}</text>')
        parts += squares(mask_cells(pattern), left, TOP) + squares(grid_cells(pattern), left, TOP + SIDE + GAP)
    names = {"text": "text token", "image": "image token", "itself": "the token itself", "hidden": "not visible"}
    for number, (color, name) in enumerate(names.items()):
        left = 20 + number * 160
        parts.append(f'<path fill="{COLORS[color]}" d="M{left} {height - 27}h13v13h-13z"/>')
        parts.append(f'<text x="{left + 19}" y="{height - 16}">{name}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="13" fill="#112">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs" / "images" / "patterns.svg").write_text(svg(), encoding="utf-8")
