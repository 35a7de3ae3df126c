"""PowerSGD's savings as calculated in Ramesh et al. 2021 (Tables 1 and 2), for any width and rank (§2.5, App. E.1)."""

from __future__ import annotations

from math import ceil


def default_rank(width: int) -> int:
    """Return the rank for a width: the paper's at its three widths (Table 1), proportional for other widths."""
    return max(128, 128 * ceil(0.225 * width / 128))


def compression_rate(width: int, rank: int, m: int = 8) -> float:
    """Return the share of traffic saved, 1 - r (m + 2) / (2 d m), which is 1 - 5 r / 8 d for m = 8 (App. E.1)."""
    return 1 - rank * (m + 2) / (2 * width * m)


def table1() -> list[tuple[int, int, int, float]]:
    """Return the rows of Table 1: effective parameters, width, rank, compression rate, for 64 layers."""
    return [(12 * 64 * d * d, d, r, compression_rate(d, r)) for d, r in ((1920, 512), (2688, 640), (3968, 896))]


def table2(d: int, r: int, m: int) -> dict[str, tuple[float, float, float]]:
    """Return Table 2: numbers of values of a layer's gradient shard and of its factors P and Q, sent by one GPU."""
    rows: dict[str, tuple[float, float, float]] = {
        "qkv and post-attention matrices": (4 * d * d / m, 4 * d * r / m, 4 * r / m * d / m),
        "first MLP matrix": (d * 4 * d / m, d * r / m, r / m * 4 * d / m),
        "second MLP matrix": (4 * d / m * d, 4 * d / m * r / m, r / m * d),
    }
    rows["total size"] = tuple(map(sum, zip(*rows.values(), strict=True)))  # pyright: ignore[reportArgumentType]
    return rows
