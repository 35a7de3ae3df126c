import pytest
import torch

from limner.errors import UserError
from limner.training.determinism import deterministic


def test_an_operation_without_a_deterministic_kernel_is_named():
    positions, values = torch.tensor([0, 0]), torch.tensor([1.0, 2.0])
    says = r"the operation put_\S* lacks a deterministic kernel on this device"
    with pytest.raises(UserError, match=says), deterministic():
        torch.zeros(2).put_(positions, values)
    with deterministic(False):
        torch.zeros(2).put_(positions, values)
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"), deterministic():
        torch.ones(2, 3) @ torch.ones(2, 3)
