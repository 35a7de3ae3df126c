"""Patterns that the package does not have: what holds for every pattern holds for them."""

from limner.attention.patterns import PATTERNS, Grid, Pattern


def dilated(grid: Grid, kernel: int = 11) -> Pattern:
    """Every second position of the two rows before it: a lane with gaps."""
    return Pattern.from_offsets("dilated", grid, range(0, 2 * grid[1] + 1, 2))


def alternate(grid: Grid, kernel: int = 11) -> Pattern:
    """Its column in every second row, up to four rows above: lanes of columns, with gaps."""
    return Pattern.from_offsets("alternate", grid, (up * grid[1] for up in (0, 2, 4)))


ALL = PATTERNS | {"dilated": dilated, "alternate": alternate}
