"""What processes of gloo send each other whole, in both directions of a link at once.

gloo sends something large only when the other end has asked for it, and asks on the connection on which it sends. Its
own collectives begin to send before they ask: where two processes do not begin at the same moment, the question waits
behind all that is being sent, and the link carries one direction after the other, for twice the time. Here all is asked
for before anything is sent.

Shapes: W processes of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed


def exchange(given: Tensor, got: Tensor, group: Any) -> distributed.Work:
    """Row i of `given` [W, n] becomes, at process i, the row of `got` [W, n] that belongs to this process."""
    got[group.rank()] = given[group.rank()]
    return _swap(list(given), got, group)


def gather(own: Tensor, everyone: Tensor, group: Any) -> distributed.Work:
    """`own` [n] becomes this process's row of `everyone` [W, n] on all. It may be a view of that row.

    Each sends to all: among more than two, gloo's ring sends less over a link that several of them share.
    """
    if everyone[group.rank()].data_ptr() != own.data_ptr():
        everyone[group.rank()] = own
    return _swap([own] * group.size(), everyone, group)


def _swap(given: Sequence[Tensor], got: Tensor, group: Any) -> distributed.Work:
    others = [i for i in range(group.size()) if i != group.rank()]
    asked = [distributed.irecv(got[i], group=group, group_src=i) for i in others]
    return _Together(asked + [distributed.isend(given[i], group=group, group_dst=i) for i in others])


class _Together(distributed.Work):
    """Through when all of them are."""

    def __init__(self, works: Sequence[distributed.Work | None]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # by default that of the group
        return all(work.wait(timeout) for work in self._works if work is not None)
