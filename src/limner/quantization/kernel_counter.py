"""Counts of the kernels that compute each layer's products.

The class name `SwitchBackLinear` proves nothing: an unsupported shape, a missing library or a compiler that replaced
the layer would go unnoticed. So each product chooses its kernel, runs it and counts it in one operation that is opaque
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
Counts = Counter[tuple[str, str, str]]  # by product, kernel, and fallback reason ("" for the fast kernel)

_ids = count(1)
_counters: WeakValueDictionary[int, KernelCounter] = WeakValueDictionary()


class KernelCounter:
    """The counts of one layer. A copy of the layer starts at zero.

    Attributes:
        id: key of the counter for custom operations, which take no Python objects: int64 [] on the CPU. For an `int`,
            `torch.compile` would compile each layer of a model separately, and stop after eight.
        counts: number of products by product, kernel and reason.
    """

    def __init__(self) -> None:
        counter_id = next(_ids)
        self.id = torch.tensor(counter_id, device="cpu")
        self.counts: Counts = Counter()
        _counters[counter_id] = self

    def __deepcopy__(self, memo: object) -> KernelCounter:
        return KernelCounter()

    def __reduce__(self) -> tuple[type[KernelCounter], tuple[()]]:
        return KernelCounter, ()


def count_product(counter_id: Tensor | None, product: str, kernel: str, fallback_reason: str = "") -> None:
    """Count one product in the counter with this id, if it exists."""
    if counter_id is not None and (counter := _counters.get(int(counter_id))) is not None:
        counter.counts[product, kernel, fallback_reason] += 1


def counts_to_json(counts: Counts) -> list[dict[str, Any]]:
    """Return counts as JSON values."""
    return [
        {"product": product, "kernel": kernel, "fallback_reason": reason, "count": n}
        for (product, kernel, reason), n in sorted(counts.items())
    ]


def counts_from_json(rows: Iterable[Mapping[str, Any]]) -> Counts:
    """Invert `counts_to_json`. Raises `KeyError`, `TypeError` or `ValueError` for malformed rows."""
    return Counter({(str(x["product"]), str(x["kernel"]), str(x["fallback_reason"])): int(x["count"]) for x in rows})
