"""Processes on devices whose backend carries no tensors of the CPU, as NCCL does not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from limner.distributed.replicated import Replicated

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
def test_what_is_on_the_cpu_travels_too_and_comes_back(ranks: Replicated, where: str) -> None:
    values = torch.zeros(3, 2, device=where, requires_grad=True)
    joined = ranks.all_gather_with_grad(values)
    joined.sum().backward()
    assert values.grad is not None
    state = torch.zeros(3, 2, dtype=torch.uint8, device=where).T  # of a generator, say
    found = [ranks.mean(values.detach()), joined, values.grad, *ranks.all_gather(state)]
    assert {x.device.type for x in found} == {where}
    assert [tuple(x.shape) for x in found] == [(3, 2), (6, 2), (3, 2), (2, 3), (2, 3)]
