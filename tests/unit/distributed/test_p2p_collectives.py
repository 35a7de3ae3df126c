"""Parts that processes send each other: what arrives where, and that all is asked for before anything is sent."""

from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from limner.distributed.p2p_collectives import all_gather, all_to_all
from ranks import on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch lacks process groups")

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def part(giver: int, taker: int, n: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(100 * giver + 10 * taker + n)
    return torch.randint(0, 200, (n,), generator=g).to(dtype)


def swap() -> dict[str, Any]:
    """Start several collectives together, the larger ones first, and wait for them in order."""
    group, rank, ranks = distributed.group.WORLD, distributed.get_rank(), distributed.get_world_size()
    order: list[str] = []
    for name in ("irecv", "isend"):
        function = getattr(distributed, name)
        setattr(distributed, name, lambda *a, f=function, name=name, **k: (order.append(name), f(*a, **k))[1])
    sizes, exchanged, gathered, works = (200_000, 3), [], [], []
    for n in sizes:
        for dtype in DTYPES:
            got = torch.zeros(ranks, n, dtype=dtype)
            works.append(all_to_all(torch.stack([part(rank, i, n, dtype) for i in range(ranks)]), got, group))
            exchanged.append(got)
            everyone = torch.zeros(ranks, n, dtype=dtype)
            everyone[rank] = part(rank, 0, n, dtype)
            own = everyone[rank] if n == 3 else everyone[rank].clone()  # as FSDP gives it, and not
            works.append(all_gather(own, everyone, group))
            gathered.append(everyone)
    for work in works:
        work.wait()
    wrong = []
    for (n, dtype), got, everyone in zip([(n, d) for n in sizes for d in DTYPES], exchanged, gathered, strict=True):
        wrong += [("all_to_all", n, dtype, i) for i in range(ranks) if not got[i].equal(part(i, rank, n, dtype))]
        wrong += [("gather", n, dtype, i) for i in range(ranks) if not everyone[i].equal(part(i, 0, n, dtype))]
    return {"wrong": wrong, "order": order}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_part_arrives_where_it_belongs_and_is_asked_for_before_anything_is_sent(ranks):
    for found in on_ranks(ranks, swap):
        assert found["wrong"] == []
        one = ["irecv"] * (ranks - 1) + ["isend"] * (ranks - 1)
        times = len(found["order"]) // len(one)
        assert times == 12 and found["order"] == one * times
