import contextlib

import pytest
import torch
from torch import nn

from limner.errors import UserError
from limner.optim.ema import Ema, EmaOnCpu


def test_the_average_is_the_textbook_sum() -> None:
    model = nn.Linear(3, 2)
    ema = Ema(model, decay=0.9, warmup=False)
    expected = model.weight.detach().clone()
    for update in range(1, 6):
        with torch.no_grad():
            model.weight.normal_()
        ema.update(model, update)
        expected = 0.9 * expected + 0.1 * model.weight.detach()
    torch.testing.assert_close(ema.state_dict()["weight"], expected)


@pytest.mark.parametrize("kind", [Ema, EmaOnCpu])
def test_averages_of_float64_are_float64(kind: type[Ema]) -> None:
    model = nn.Linear(3, 2).double()
    ema, before = kind(model, decay=0.5, warmup=False), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.normal_()
    ema.update(model, 1)
    expected = torch.lerp(before, model.weight.detach(), 0.5)
    with ema.swapped(model):
        assert torch.equal(model.weight, expected)


def test_every_and_warmup() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema = Ema(model, decay=0.99, every=25)
    nn.init.ones_(model.weight)
    for update in range(1, 25):
        ema.update(model, update)
    assert ema.state_dict()["weight"].item() == 0
    ema.update(model, 25)
    assert ema.state_dict()["weight"].item() == pytest.approx(1 - 2 / 11)


def test_swapped_restores_parameters_after_an_error() -> None:
    model = nn.Linear(3, 2)
    ema = Ema(model, decay=0.5)
    with torch.no_grad():
        model.weight.add_(1)
    original, parameter = model.weight.detach().clone(), model.weight
    with contextlib.suppress(ZeroDivisionError), ema.swapped(model):
        assert torch.equal(model.weight, ema.state_dict()["weight"])
        raise ZeroDivisionError
    assert torch.equal(model.weight, original) and model.weight is parameter
    ema.copy_to(model)
    torch.testing.assert_close(model.weight.detach(), original - 1)


def test_a_state_of_another_model_is_rejected() -> None:
    with pytest.raises(UserError, match="weight"):
        Ema(nn.Linear(3, 2), 0.9).load_state_dict(Ema(nn.Linear(2, 2), 0.9).state_dict())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_averages_on_the_cpu_are_the_same_whenever_they_are_read(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 200)).to(device)
    on_device, on_cpu = (kind(model, decay=0.9, every=2) for kind in (Ema, EmaOnCpu))
    for update in range(1, 12):
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        on_device.update(model, update)
        on_cpu.update(model, update)
        if update in (4, 5, 11):
            for name, average in on_cpu.state_dict().items():
                assert average.device.type == "cpu"
                torch.testing.assert_close(average, on_device.state_dict()[name].cpu(), rtol=0, atol=1e-7)
    loaded = EmaOnCpu(model, decay=0.9, every=2)
    loaded.update(model, 2)
    loaded.load_state_dict(on_cpu.state_dict())
    loaded.copy_to(model)
    torch.testing.assert_close(model[0].weight.cpu(), on_cpu.state_dict()["0.weight"], rtol=0, atol=0)
