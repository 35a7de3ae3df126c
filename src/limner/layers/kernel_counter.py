"""Which kernel computed which product of which layer, counted while it runs.

That a layer is called `SwitchBackLinear` proves nothing: a shape that a kernel cannot take, a missing library or a
compiler that replaced the layer would all be silent. So each product asks for its kernel, runs it and counts it in one
operation that neither `torch.compile` nor autograd looks into.

Counted is each execution: also those of evaluation, and a forward product again when checkpointing recomputes it. A
replayed CUDA graph runs no Python and counts nothing.
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
    """The counts of one layer. A copy of the layer counts anew.

    Attributes:
        number: by which operations, which take no Python objects, find it: int64 [] on the CPU. With an `int`
            `torch.compile` would make code for each layer of a model, and give up after eight.
        counts: of its products.
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
    """Count one product in the tally of this number, if there is one."""
    if number is not None and (tally := _tallies.get(int(number))) is not None:
        tally.counts[product, kernel, why] += 1


def to_rows(counts: Counts) -> list[dict[str, Any]]:
    """Counts as JSON values."""
    return [
        {"product": product, "kernel": kernel, "why": why, "count": n}
        for (product, kernel, why), n in sorted(counts.items())
    ]


def from_rows(rows: Iterable[Mapping[str, Any]]) -> Counts:
    """The inverse. Raises `KeyError`, `TypeError` or `ValueError` if they are not of that form."""
    return Counter({(str(x["product"]), str(x["kernel"]), str(x["why"])): int(x["count"]) for x in rows})
