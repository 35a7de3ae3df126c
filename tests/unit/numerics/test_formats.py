"""Shapes, layouts and mistakes; values are in tests/reference/test_formats.py."""

import copy
import pickle

import pytest
import torch

from limner.numerics import compile_elementwise
from limner.numerics.formats import E6M9, FloatFormat


def test_codes_keep_shape_and_layout() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    codes = E6M9.pack(x)
    assert codes.dtype == torch.int16 and codes.stride() == x.stride()
    assert torch.equal(codes, E6M9.pack(x.contiguous()))
    assert torch.equal(E6M9.unpack(codes), E6M9.round(x.contiguous()))
    for odd in (x[:, ::2], x.mT, torch.randn(3, 1).expand(3, 4), torch.zeros(0, 2), torch.tensor(1.5)):
        assert torch.equal(E6M9.round(odd), E6M9.round(odd.contiguous()))
    out = torch.empty_like(x.contiguous(), dtype=torch.int16)
    assert E6M9.pack(x, out=out) is out and torch.equal(out, codes)
    assert FloatFormat(1, 4, 3).pack(x).dtype == torch.uint8
    assert torch.equal(E6M9.pack(x.double()), codes)


@pytest.mark.parametrize("seed", [None, 3])
def test_codes_go_to_a_part_of_a_tensor_and_nowhere_else(seed: int | None) -> None:
    def drawn() -> torch.Generator | None:
        return None if seed is None else torch.Generator().manual_seed(seed)

    x = torch.randn(4, 3)
    for part in (lambda y: y[:4, :3], lambda y: y[::2, 1:4], lambda y: y[4:, -3:], lambda y: y.T[:4, :3]):
        memory = torch.full((8, 7), -1, dtype=torch.int16)
        out = part(memory)
        assert E6M9.pack(x, drawn(), out=out) is out and torch.equal(out, E6M9.pack(x, drawn()))
        out.fill_(-1)
        assert (memory == -1).all()


def test_pieces_make_no_difference() -> None:
    x = torch.randn(100_001)
    assert torch.equal(E6M9.pack(x), E6M9.encode(x, None))


def test_invalid_formats_raise() -> None:
    for parts in ((1, 8, 7), (2, 4, 3), (1, 7, 9), (1, 6, 0), (0, 0, 4)):
        with pytest.raises(ValueError, match=r"choose at most 16|must be at (least|most)"):
            FloatFormat(*parts)
    with pytest.raises(ValueError, match="1-6-9 exceeds the range of fp32: choose a bias near 31"):
        FloatFormat(1, 6, 9, bias=-60)
    with pytest.raises(ValueError, match="`out` must be torch.int16"):
        E6M9.pack(torch.zeros(3), out=torch.zeros(3, dtype=torch.uint8))


def test_functions_that_cannot_be_compiled_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def broken(function, dynamic):
        def call(*args):
            raise TorchDynamoException("no compiler\nand more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    double = compile_elementwise.CompiledElementwise(lambda x: 2 * x)
    with pytest.warns(UserWarning, match=r"torch.compile failed \(no compiler\)") as warned:
        once = double(torch.ones(compile_elementwise.MIN_COMPILED_SIZE))
    assert len(warned) == 1 and torch.equal(double(torch.ones(compile_elementwise.MIN_COMPILED_SIZE)), once)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda form: pickle.loads(pickle.dumps(form))])
def test_a_format_that_was_used_can_be_copied(twin) -> None:
    form, x = FloatFormat(1, 5, 2, bias=16), torch.randn(7)
    codes = form.pack(x)
    other = twin(form)
    assert other == form and torch.equal(other.pack(x), codes)
