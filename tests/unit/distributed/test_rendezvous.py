"""Processes of one start meet in a store in which others have met, and some have died while they met."""

import random
import threading
import time

import pytest
from torch import distributed

from limner.distributed.rendezvous import agree_on_run_id


def meet(store: distributed.Store, ranks: list[int], world: int, seconds: float = 20) -> list[str | Exception]:
    """Return the name or error of each rank, which runs in a thread and starts after a delay."""
    found: list[str | Exception] = [""] * len(ranks)

    def go(i: int, rank: int, wait: float) -> None:
        time.sleep(wait)
        try:
            found[i] = agree_on_run_id(store, rank, world, seconds)
        except TimeoutError as error:
            found[i] = error

    chance = random.Random(len(ranks))
    threads = [threading.Thread(target=go, args=(i, rank, chance.uniform(0, 0.2))) for i, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_start_has_a_name_of_its_own() -> None:
    store, names = distributed.HashStore(), set()
    for world in (4, 4, 2, 1, 5):
        found = meet(store, list(range(world)), world)
        assert len(set(found)) == 1 and isinstance(found[0], str)
        names |= set(found)
    assert len(names) == 5


@pytest.mark.parametrize("dead", [[0, 1], [1, 2], [2]])
def test_who_died_on_the_way_is_not_waited_for(dead: list[int]) -> None:
    store = distributed.HashStore()
    assert all("not all 3 processes" in str(error) for error in meet(store, dead, 3, seconds=0.5))
    assert len(set(meet(store, [0, 1, 2], 3))) == 1


def test_who_still_waits_for_the_dead_is_no_hindrance() -> None:
    """Two of three wait for the third when a start of two begins, which takes their places."""
    store = distributed.HashStore()
    old = threading.Thread(target=meet, args=(store, [0, 1], 3, 1.0))
    old.start()
    time.sleep(0.3)
    found = meet(store, [0, 1], 2)
    old.join()
    assert len(set(found)) == 1 and isinstance(found[0], str)
