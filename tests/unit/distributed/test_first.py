"""The others wait for the first process, which may take long, but not for one that has ended."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed

from limner.distributed.replicated import Replicated
from ranks import at_work, on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")


def first(folder: Path, seconds: float, dies: bool = False) -> list[str] | str:
    """List what the first process made, in more time than the timeout of a collective."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    distributed.destroy_process_group()
    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2))
    ours = Replicated()
    try:
        for name in ("codes", "more"):
            with ours.main_first():
                if ours.is_main:
                    time.sleep(seconds)
                    if dies:
                        os._exit(1)
                    (folder / name).touch()
                found = sorted(path.name for path in folder.iterdir() if path.name != "store")
    except RuntimeError as error:
        return str(error)
    return found


@pytest.mark.slow
def test_the_first_process_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    assert on_ranks(2, first, tmp_path, 5.0) == [["codes", "more"]] * 2


def test_its_end_is_noticed_at_once(tmp_path: Path) -> None:
    with at_work(2, first, tmp_path, 1.0, True) as (_, (_, other)):
        assert other.poll(60)
        assert "Connection" in other.recv()[1]
