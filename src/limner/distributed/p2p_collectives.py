"""All-to-all and all-gather on gloo from point-to-point messages that use both directions of a link simultaneously.

gloo sends a large message only after the receiver has requested it, and the request uses the same connection as data.
gloo's collectives start to send before they request. If two processes start at different times, a request waits
behind data, the link carries one direction after the other, and the collective takes twice as long. Here each process
posts all receives before it sends.

Shapes: W processes of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed


def exchange(given: Tensor, got: Tensor, group: Any) -> distributed.Work:
    """Send row i of `given` [W, n] to process i, and receive the row from process i as row i of `got` [W, n]."""
    got[group.rank()] = given[group.rank()]
    return _swap(list(given), got, group)


def gather(own: Tensor, everyone: Tensor, group: Any) -> distributed.Work:
    """Write `own` [n] to this process's row of `everyone` [W, n] on all processes. `own` may be a view of that row.

    Each process sends to all others. With more than two, gloo's ring sends less over a link shared by several.
    """
    if everyone[group.rank()].data_ptr() != own.data_ptr():
        everyone[group.rank()] = own
    return _swap([own] * group.size(), everyone, group)


def _swap(given: Sequence[Tensor], got: Tensor, group: Any) -> distributed.Work:
    others = [i for i in range(group.size()) if i != group.rank()]
    asked = [distributed.irecv(got[i], group=group, group_src=i) for i in others]
    return _Together(asked + [distributed.isend(given[i], group=group, group_dst=i) for i in others])


class _Together(distributed.Work):
    """A `Work` that completes when all its parts have completed."""

    def __init__(self, works: Sequence[distributed.Work | None]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # 0 takes the timeout of the group
        return all(work.wait(timeout) for work in self._works if work is not None)
