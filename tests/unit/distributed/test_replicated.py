"""Processes with the same weights: the first one may take long, weights that drift apart are found, and values on the
CPU travel with a backend that carries none, such as NCCL."""

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.training.train_module import Trainable
from ranks import at_work, on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")


DEVICE = torch.device("meta")  # stands for a GPU; fake tensors know on which device they would be


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicated]:
    """A rank of two, whose collectives raise an error for CPU tensors."""

    def refusing(collective: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **options: Any) -> Any:
            for x in [x for a in arguments for x in (a if isinstance(a, list) else [a]) if isinstance(x, torch.Tensor)]:
                if x.device != DEVICE:
                    raise RuntimeError(f"No backend type associated with device type {x.device.type}")
            return collective(*arguments, **options)

        return checked

    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(distributed, name, refusing(getattr(distributed, name)))
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with FakeTensorMode():
            ours = Replicated()
            ours.device = DEVICE
            yield ours
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_values_on_the_cpu_are_reduced_and_returned_to_it(ranks: Replicated, where: str) -> None:
    values = torch.zeros(3, 2, device=where, requires_grad=True)
    joined = ranks.all_gather_with_grad(values)
    joined.sum().backward()
    assert values.grad is not None
    state = torch.zeros(3, 2, dtype=torch.uint8, device=where).T  # of a generator, say
    found = [ranks.mean(values.detach()), joined, values.grad, *ranks.all_gather(state)]
    assert {x.device.type for x in found} == {where}
    assert [tuple(x.shape) for x in found] == [(3, 2), (6, 2), (3, 2), (2, 3), (2, 3)]


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


PRIOR = TransformerConfig(
    text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=2, heads=2, kernel=3
)  # fmt: skip


def drifted() -> str:
    model = PRIOR.build()
    parallel = Replicated(Fp32Reducer)
    parallel.prepare(Trainable(model, Autoregressive()), torch.device("cpu"), torch.float32)
    if distributed.get_rank() == 1:
        with torch.no_grad():
            model.head.image.weight[0, 0] += 1e-6
    with pytest.raises(UserError) as error:
        parallel.assert_replicas_equal(model.parameters())
    return str(error.value)


def test_replicas_that_drift_apart_are_found():
    assert all("the weights of process 0 and of" in says for says in on_ranks(2, drifted))


def compressed() -> list[str]:
    summaries = []
    for parallel in (Replicated(), Sharded(2), Sharded(1), Replicated(Fp32Reducer)):
        parallel.grad_compression_rank = 4
        parallel.prepare(Trainable(PRIOR.build(), Autoregressive()), torch.device("cpu"), torch.float32)
        summaries.append(parallel.reduction.summary())
    return summaries


def test_replicas_compress_to_the_rank_of_a_stage_unless_a_reducer_is_given():
    for replicated, sharded, one_replica, given in on_ranks(2, compressed):
        assert replicated == sharded == "gradients of 8 of 8 matrices are compressed to rank 4"
        assert one_replica == given == ""
