"""Triton's decoding kernel against torch's operations: on a GPU or, with TRITON_INTERPRET=1 set before Triton is
imported, in its interpreter. `test_triton.py` runs this file in a new process."""

import pytest
import torch
import triton

from limner.attention import cache, triton_decode
from limner.attention.cache import KVCache, LayerKVCache
from more_patterns import ALL

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3} | (
    {} if DEVICE == "cpu" else {torch.bfloat16: 2e-2}
)  # not interpreted


@pytest.mark.parametrize("kind", sorted(ALL))
@pytest.mark.parametrize(
    ("dtype", "captions", "candidates"),
    [
        *((torch.float32, *rows) for rows in [(1, 1), (2, 1), (2, 3), (1, 18)]),
        *((dtype, *rows) for dtype in TOLERANCES if dtype != torch.float32 for rows in [(2, 3), (1, 18)]),
    ],
)
def test_decoding_equals_torch(kind, dtype, captions, candidates, monkeypatch):
    torch.manual_seed(0)
    grid, heads, c, rows = (4, 3), 2, 16, captions * candidates
    pattern = ALL[kind](grid, 3)
    prefix = [torch.randn(captions, heads, 140, c).to(DEVICE, dtype) for _ in range(2)]
    caches = [KVCache([LayerKVCache.from_prefix(pattern, *prefix)]).expand(candidates) for _ in range(2)]
    ours, theirs = (x.layers[0] for x in caches)
    calls = []
    attend = triton_decode.attend
    monkeypatch.setattr(triton_decode, "attend", lambda *args: calls.append(1) or attend(*args))
    for step in range(grid[0] * grid[1]):
        states = torch.randn(rows, 1, 3 * heads * c).to(DEVICE, dtype)  # in the layout of an attention layer
        q, k, v = (y.view(rows, 1, heads, c).transpose(1, 2) for y in states.chunk(3, -1))
        position = torch.full((1,), step, device=DEVICE)
        monkeypatch.setattr(cache, "can_launch_triton", lambda x: True)
        output = ours.append(position, q, k, v)
        monkeypatch.setattr(cache, "can_launch_triton", lambda x: False)
        expected = theirs.append(position, q, k, v)
        assert len(calls) == step + 1 and output.shape == expected.shape and output.dtype == dtype
        torch.testing.assert_close(output, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        assert all(torch.equal(x, y) for x, y in zip(ours.buffers, theirs.buffers, strict=True))


def test_unsupported_layouts_use_torch():
    x = torch.randn(2, 3, 1, 16)
    assert triton_decode.supports(x, x.transpose(0, 1))
    assert not triton_decode.supports(x, x.double()) and not triton_decode.supports(x, x.mT)
    assert not triton_decode.supports(x[..., :8]) and not triton_decode.supports(torch.randn(2, 3, 1, 24))
