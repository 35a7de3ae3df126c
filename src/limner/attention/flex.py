"""Sparse attention on a GPU by torch's FlexAttention, which Inductor compiles to a Triton kernel.

One kernel replaces the copies, products and softmax of `sparse.py` and keeps scores on the chip; another computes the
gradients. Kernels skip blocks of queries and keys where no query sees a key. As in `sparse.py`, the image is transposed
for patterns that see only their own column. The first call of each pattern compiles for some seconds; torch caches the
code on disk.

Shapes: B batch, H heads, P prefix, h x w grid, N = P + h * w positions, C head width.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from limner.attention.patterns import Grid, Pattern
from limner.compat import FakeTensor
from limner.numerics.compile_elementwise import specialize_ints, triton_supports

_MAX_RUNS = 8  # a kernel compares runs of consecutive offsets one by one
_BLOCK = 128  # queries and keys of a block
_MIN_HEAD_WIDTH = 16  # smallest head width of a product on tensor cores


class _CompiledFlexAttention:
    """The compiled FlexAttention of all models. `works` is False after a compilation failed."""

    def __init__(self) -> None:
        self.works, self._compiled = True, None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        if torch.compiler.is_compiling():
            return flex_attention(q, k, v, block_mask=mask)
        self._compiled = self._compiled or torch.compile(flex_attention, fullgraph=True)
        with specialize_ints():
            return self._compiled(q, k, v, block_mask=mask)


compiled_flex_attention = _CompiledFlexAttention()


def supports(pattern: Pattern, q: Tensor) -> bool:
    """Return True if `attend` supports q: a GPU tensor with Triton, not fake, and a pattern of few runs."""
    return (
        compiled_flex_attention.works
        and triton_supports(q)
        and q.shape[-1] >= _MIN_HEAD_WIDTH
        and q.dtype != torch.float64  # scores are fp32
        and len(runs(pattern)) <= _MAX_RUNS
        and not isinstance(q, FakeTensor)
    )


def attend(
    pattern: Pattern, prefix: int, q: Float[Tensor, "B H N C"], k: Float[Tensor, "B H N C"], v: Float[Tensor, "B H N C"]
) -> Float[Tensor, "B H N C"] | None:
    """Return softmax(q k^T / sqrt(C)) v under the mask `attention_mask(pattern, prefix)`; None, with one warning, if
    the kernel fails to compile or run."""

    def reorder(x: Tensor, grid: Grid) -> Tensor:
        return torch.cat([x[:, :, :prefix], to_column_order(x[:, :, prefix:], grid)], 2)

    if pattern.by_column:
        q, k, v = (reorder(x, pattern.grid) for x in (q, k, v))
    try:
        y = compiled_flex_attention(q, k, v, _block_mask(pattern, prefix, q.device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # torch's compiler raises many kinds
        compiled_flex_attention.works = False
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"FlexAttention failed ({reason}): attention runs more slowly", stacklevel=2)
        return None
    h, w = pattern.grid
    return reorder(y, (w, h)) if pattern.by_column else y


@lru_cache(maxsize=32)
def runs(pattern: Pattern) -> list[tuple[int, int]]:
    """Return first and last step of each run of consecutive visible steps back along a lane."""
    steps = [back // pattern.num_lanes for back in pattern.offsets]
    firsts, lasts = ([n for n in steps if n + neighbor not in steps] for neighbor in (-1, 1))
    return list(zip(firsts, lasts, strict=True))


def mask_mod(pattern: Pattern, prefix: int, device: torch.device) -> Callable[..., Tensor]:
    """Return FlexAttention's `mask_mod`, (batch, head, query, key) -> True if the query sees the key. Arguments are
    indices; if `pattern.by_column`, the image is in column order."""
    (nearest, farthest), *others = runs(pattern)
    positions = torch.arange(prefix + pattern.grid[0] * pattern.grid[1], device=device) - prefix
    length = len(positions) - prefix if pattern.num_lanes == 1 else pattern.grid[0]
    start = (prefix + positions - positions % length).int()  # of the lane; division is slow in a kernel

    def allows(_b: Tensor, _h: Tensor, q: Int64[Tensor, ""], k: Int64[Tensor, ""]) -> Bool[Tensor, ""]:
        back = q - k
        visible = (back >= nearest) & (back <= farthest)
        for first, last in others:
            visible = visible | ((back >= first) & (back <= last))
        if pattern.by_column:
            visible = visible & (k >= start[q])
        return torch.where(k < prefix, back >= 0, visible)

    return allows


@lru_cache(maxsize=32)
def _block_mask(pattern: Pattern, prefix: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    n = prefix + pattern.grid[0] * pattern.grid[1]
    with torch.inference_mode(False):
        return create_block_mask(mask_mod(pattern, prefix, device), None, None, n, n, device=device, BLOCK_SIZE=_BLOCK)  # pyright: ignore[reportArgumentType]


def to_column_order(x: Tensor, grid: Grid) -> Tensor:
    """Reorder the positions of a grid from raster order to column order, [..., S, C]."""
    return x.unflatten(-2, grid).transpose(-3, -2).flatten(-3, -2)
