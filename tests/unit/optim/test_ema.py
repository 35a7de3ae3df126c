import contextlib

import pytest
import torch
from torch import nn

from limner.errors import UserError
from limner.optim.ema import Ema


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


def test_swapped_gives_the_average_and_restores_even_after_an_error() -> None:
    model = nn.Linear(3, 2)
    ema = Ema(model, decay=0.5)
    with torch.no_grad():
        model.weight.add_(1)
    own, parameter = model.weight.detach().clone(), model.weight
    with contextlib.suppress(ZeroDivisionError), ema.swapped(model):
        assert torch.equal(model.weight, ema.state_dict()["weight"])
        raise ZeroDivisionError
    assert torch.equal(model.weight, own) and model.weight is parameter
    ema.copy_to(model)
    torch.testing.assert_close(model.weight.detach(), own - 1)


def test_state_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match="weight"):
        Ema(nn.Linear(3, 2), 0.9).load_state_dict(Ema(nn.Linear(2, 2), 0.9).state_dict())
