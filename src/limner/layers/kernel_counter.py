"""Counts of the kernels that compute each layer's products.

The class name `SwitchBackLinear` proves nothing: an unsupported shape, a missing library or a compiler that replaced
the layer would all be silent. So each product chooses its kernel, runs it and counts it in one operation that is opaque
to `torch.compile` and autograd.

Every execution counts, also in evaluation and when checkpointing recomputes a forward product. A replayed CUDA graph
runs no Python and counts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Product = Literal["forward", "input gradient", "weight gradient"]
Counts = Counter[tuple[str, str, str]]  # by product, kernel, and why it was not the fast one ("" if it was)

_numbers = count(1)
_tallies: WeakValueDictionary[int, Tally] = WeakValueDictionary()


class Tally:
    """The counts of one layer. A copy of the layer starts at zero.

    Attributes:
        number: key of the tally for custom operations, which take no Python objects: int64 [] on the CPU. For an `int`,
            `torch.compile` would compile each layer of a model separately, and stop after eight.
        counts: number of products by product, kernel and reason.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")
        self.counts: Counts = Counter()
        _tallies[number] = self

    def __deepcopy__(self, memo: object) -> Tally:
        return Tally()

    def __reduce__(self) -> tuple[type[Tally], tuple[()]]:
        return Tally, ()


def count_product(number: Tensor | None, product: str, kernel: str, why: str = "") -> None:
    """Count one product in the tally with this number, if it exists."""
    if number is not None and (tally := _tallies.get(int(number))) is not None:
        tally.counts[product, kernel, why] += 1


def to_rows(counts: Counts) -> list[dict[str, Any]]:
    """Return counts as JSON values."""
    return [
        {"product": product, "kernel": kernel, "why": why, "count": n}
        for (product, kernel, why), n in sorted(counts.items())
    ]


def from_rows(rows: Iterable[Mapping[str, Any]]) -> Counts:
    """Invert `to_rows`. Raises `KeyError`, `TypeError` or `ValueError` for malformed rows."""
    return Counter({(str(x["product"]), str(x["kernel"]), str(x["why"])): int(x["count"]) for x in rows})
