"""Compiled functions, and whether there is Triton."""

import pytest
import torch
from torch._dynamo import config
from torch._subclasses.fake_tensor import FakeTensorMode

from limner.numerics import compile_elementwise


@pytest.fixture
def asked():
    compile_elementwise.triton_works.cache_clear()
    yield
    compile_elementwise.triton_works.cache_clear()


def test_settings_of_the_compiler_hold_within_the_block_alone():
    before = config.specialize_int, config.recompile_limit
    with compile_elementwise.specialize_ints():
        assert config.specialize_int and config.recompile_limit >= 64
    with pytest.raises(KeyError), compile_elementwise.specialize_ints():
        raise KeyError
    assert (config.specialize_int, config.recompile_limit) == before


@pytest.mark.usefixtures("asked")
def test_triton_without_a_c_compiler_warns_once(monkeypatch):
    pytest.importorskip("triton")
    from limner.numerics import triton_probe

    def broken():
        raise RuntimeError("Failed to find C compiler.\nand more")

    with FakeTensorMode():
        x = torch.empty(3, device="cuda")  # of a GPU that is elsewhere
    assert compile_elementwise.triton_supports(x) and not compile_elementwise.can_launch_triton(x)
    compile_elementwise.triton_works.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_probe, "works", broken)
    with pytest.warns(UserWarning, match=r"Triton failed \(Failed to find C compiler\.\)"):
        assert not compile_elementwise.triton_supports(x)
    assert not compile_elementwise.triton_supports(x)
    assert not compile_elementwise.triton_supports(torch.ones(3))


@pytest.mark.gpu
@pytest.mark.usefixtures("asked")
def test_triton_works_on_a_gpu():
    assert compile_elementwise.can_launch_triton(torch.ones(3, device="cuda"))
