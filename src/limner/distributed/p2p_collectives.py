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


def all_to_all(sent: Tensor, received: Tensor, group: Any) -> distributed.Work:
    """Send row i of `sent` [W, n] to process i, and receive the row from process i as row i of `received` [W, n]."""
    received[group.rank()] = sent[group.rank()]
    return _exchange(list(sent), received, group)


def all_gather(row: Tensor, rows: Tensor, group: Any) -> distributed.Work:
    """Write `row` [n] to this process's row of `rows` [W, n] on all processes. `row` may be a view of that row.

    Each process sends to all others. With more than two, gloo's ring sends less over a link shared by several.
    """
    if rows[group.rank()].data_ptr() != row.data_ptr():
        rows[group.rank()] = row
    return _exchange([row] * group.size(), rows, group)


def _exchange(sent: Sequence[Tensor], received: Tensor, group: Any) -> distributed.Work:
    others = [i for i in range(group.size()) if i != group.rank()]
    receives = [distributed.irecv(received[i], group=group, group_src=i) for i in others]
    return _AllOf(receives + [distributed.isend(sent[i], group=group, group_dst=i) for i in others])


class _AllOf(distributed.Work):
    """A `Work` that completes when all its parts have completed."""

    def __init__(self, works: Sequence[distributed.Work | None]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # 0 takes the timeout of the group
        return all(work.wait(timeout) for work in self._works if work is not None)
