"""Compiled functions, and whether there is Triton."""

import pytest
import torch
from torch._dynamo import config
from torch._subclasses.fake_tensor import FakeTensorMode

from limner.numerics import compile_elementwise


@pytest.fixture
def asked():
    compile_elementwise._triton_works.cache_clear()
    yield
    compile_elementwise._triton_works.cache_clear()


def test_settings_of_the_compiler_hold_within_the_block_alone():
    before = config.specialize_int, config.recompile_limit
    with compile_elementwise.specialised():
        assert config.specialize_int and config.recompile_limit >= 64
    with pytest.raises(KeyError), compile_elementwise.specialised():
        raise KeyError
    assert (config.specialize_int, config.recompile_limit) == before


@pytest.mark.usefixtures("asked")
def test_triton_without_a_c_compiler_is_told_once_and_left_alone(monkeypatch):
    pytest.importorskip("triton")
    from limner.numerics import triton_probe

    def broken():
        raise RuntimeError("Failed to find C compiler.\nand more")

    with FakeTensorMode():
        x = torch.empty(3, device="cuda")  # of a GPU that is elsewhere
    assert compile_elementwise.triton_runs(x) and not compile_elementwise.triton_launches(x)
    compile_elementwise._triton_works.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_probe, "works", broken)
    with pytest.warns(UserWarning, match=r"Triton does not work here \(Failed to find C compiler\.\)"):
        assert not compile_elementwise.triton_runs(x)
    assert not compile_elementwise.triton_runs(x)
    assert not compile_elementwise.triton_runs(torch.ones(3))


@pytest.mark.gpu
@pytest.mark.usefixtures("asked")
def test_triton_works_on_a_gpu():
    assert compile_elementwise.triton_launches(torch.ones(3, device="cuda"))
