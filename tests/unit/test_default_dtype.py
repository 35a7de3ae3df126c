"""Scales, step counts and sums are fp32 with every default dtype of torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from limner.models.transformer import Block
from limner.objectives.cross_entropy import linear_cross_entropy
from limner.optim import AdamW16, Beta2WarmupAdamW, StableAdamW
from limner.quantization import LLMInt8Linear, SwitchBackLinear, SwitchBackQLinear
from limner.quantization.quantize import quantize
from limner.training.config import TrainConfig
from limner.training.grad_scaler import scaling
from limner.training.train_state import TrainState


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, generator=torch.Generator().manual_seed(sum(shape)))


def layer(make: Callable[[nn.Linear], nn.Module]) -> list[torch.Tensor]:
    linear = nn.Linear(24, 8, dtype=torch.float32)
    nn.init.zeros_(linear.bias)
    linear.weight.data.copy_(numbers(8, 24))
    x = numbers(16, 24).requires_grad_()
    y = make(linear)(x)
    y.backward(numbers(16, 8))
    return [y.detach(), x.grad, linear.weight.grad]  # type: ignore[list-item]


def optimised(make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    parameters = [nn.Parameter(numbers(*shape)) for shape in ((5, 3), (400, 400))]
    optimizer = make(parameters)
    for _ in range(300):  # beyond 256 bf16 cannot count
        for p in parameters[:1]:
            p.grad = numbers(*p.shape)
        optimizer.step()
    parameters[1].grad = numbers(400, 400)
    optimizer.step()
    return [*parameters, *(optimizer.state[p]["step"] for p in parameters)]


def scales(kind: str) -> list[torch.Tensor]:
    config = TrainConfig(steps=1, scaling=kind)  # type: ignore[arg-type]
    (hook,) = scaling(run := TrainState(nn.ModuleList([Block(8, 2)]).float(), lambda *_: None, config))  # type: ignore[arg-type]
    for p in run.parameters:
        p.grad = torch.ones_like(p)
    hook.after_backward(run)
    return [value for value in vars(hook).values() if isinstance(value, torch.Tensor)]


def loss() -> list[torch.Tensor]:
    head = nn.Linear(4, 9, dtype=torch.float32)
    nn.init.zeros_(head.bias)
    head.weight.data.copy_(numbers(9, 4))
    return [linear_cross_entropy(numbers(6, 4), head, torch.arange(6)).detach()]


@pytest.mark.parametrize(
    "compute",
    [
        lambda: list(quantize(numbers(5, 7), by_row=True)),
        loss,
        *(lambda kind=kind: layer(kind.from_linear) for kind in (SwitchBackLinear, SwitchBackQLinear, LLMInt8Linear)),
        *(lambda make=make: optimised(make) for make in (AdamW16, Beta2WarmupAdamW, StableAdamW)),
        *(lambda kind=kind: scales(kind) for kind in ("resblocks", "loss", "tensors")),
    ],
)
def test_the_default_format_changes_nothing(compute: Callable[[], list[Any]]) -> None:
    expected = compute()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = compute()
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
