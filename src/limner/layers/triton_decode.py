"""`LayerCache.append` as one Triton kernel: attention from one position to the text and to the cache, for GPUs.

In torch operations this takes some thirty small kernels for each layer of each step, which take longer than reading the
weights of a model with a billion parameters. Here one program handles a head and some candidates of a caption, which
share the text's keys and values. It writes the new key and value. One softmax runs over text and image in blocks, in
fp32 (Milakov & Gimelshein 2018).

This module is imported only with a GPU. Without one, tests run it under Triton's interpreter and compile it ahead of
time.

Shapes: B captions, M rows (as many for each caption), H heads, P prefix, C head width; L lines of a ring each.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# Triton turns the arguments of its functions into constants.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOGETHER = 16  # candidates that share a product with the text, on tensor cores
_KEYS = 64  # text keys per block
_SLOTS, _WARPS = {1: 32, _TOGETHER: 8}, {1: 4, _TOGETHER: 8}  # ring slots per block, and warps: as registers allow


def attend(
    position: Tensor, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor], rings: tuple[Tensor, Tensor],
    hole_bias: Tensor,
) -> Tensor:  # fmt: skip
    """Write k and v [M, H, 1, C] at the image's `position`, int64 [1]; return its attention output [M, H, 1, C].

    `prefix` holds keys and values [B, H, P, C], `rings` the image's keys and values [L, M, H, ring, C].
    """
    (m, h, _, c), (b, _, p, _) = q.shape, prefix[0].shape
    lines, ring = len(rings[0]), len(hole_bias)
    n = m // b
    out = torch.empty(m, 1, h, c, dtype=q.dtype, device=q.device).transpose(1, 2)
    some = 1 if n == 1 else _TOGETHER
    launch: Any = attend_kernel[b * triton.cdiv(n, some), h]
    launch(
        position, q, k, v, *prefix, *rings, hole_bias, out, n, p, ring, lines, h, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), rings[0].stride(0), rings[0].stride(1), c**-0.5, C=c,
        SOME=some, KEYS=_KEYS, SLOTS=_SLOTS[some], num_warps=_WARPS[some],
    )  # fmt: skip
    return out


def takes(x: Tensor, *others: Tensor) -> bool:
    """Return True if the kernel supports format, head width C and strides of states, keys and values [..., C]."""
    c, fits = x.shape[-1], x.dtype != torch.float64  # scores are fp32
    return fits and c >= 16 and c & (c - 1) == 0 and all(y.stride(-1) == 1 and y.dtype == x.dtype for y in (x, *others))


@triton.jit
def _more(most, total, sums, scores, values, TOGETHER: tl.constexpr):
    """Update a running softmax (largest score [m], sum [m], weighted values [m, C]) with more keys: scores [m, j],
    values [j, C] shared by all rows or [m, j, C]."""
    largest = tl.maximum(most, tl.max(scores, 1))
    before, weights = tl.exp(most - largest), tl.exp(scores - largest[:, None])
    if TOGETHER:
        given = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    else:
        given = tl.sum(weights[:, :, None] * values.to(tl.float32), 1)
    return largest, total * before + tl.sum(weights, 1), sums * before[:, None] + given


@triton.jit
def attend_kernel(
    position, q, k, v, prefix_keys, prefix_values, keys, values, hole_bias, out, n, p, ring, lines, h,
    q_row, q_head, k_row, k_head, v_row, v_head, line_stride, row_stride, scale,
    C: tl.constexpr, SOME: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program for a head and `SOME` of a caption's `n` candidates."""
    blocks = tl.cdiv(n, SOME)
    caption, head = tl.program_id(0) // blocks, tl.program_id(1)
    number = tl.program_id(0) % blocks * SOME + tl.arange(0, SOME)
    there, row, c = (number < n)[:, None], (caption * n + number).to(tl.int64), tl.arange(0, C)
    at = tl.load(position)
    line, step = at % lines, at // lines
    begin = (line * line_stride + row * row_stride + head.to(tl.int64) * ring * C)[:, None]

    x = tl.load(q + row[:, None] * q_row + head * q_head + c, mask=there, other=0.0)
    x = (x.to(tl.float32) * scale).to(x.dtype)
    key = tl.load(k + row[:, None] * k_row + head * k_head + c, mask=there, other=0.0)
    value = tl.load(v + row[:, None] * v_row + head * v_head + c, mask=there, other=0.0)
    own = begin + step % ring * C + c
    tl.store(keys + own, key, mask=there)
    tl.store(values + own, value, mask=there)
    most = tl.sum(x.to(tl.float32) * key.to(tl.float32), 1)
    total, sums = tl.full((SOME,), 1.0, tl.float32), value.to(tl.float32)

    text = (caption * h + head).to(tl.int64) * p * C
    for start in range(0, p, KEYS):
        j = start + tl.arange(0, KEYS)
        place, known = text + j[:, None] * C + c, (j < p)[:, None]
        text_keys = tl.load(prefix_keys + place, mask=known, other=0.0)
        text_values = tl.load(prefix_values + place, mask=known, other=0.0)
        if SOME > 1:
            scores = tl.dot(x, text_keys.T, input_precision="ieee")
            scores = tl.where((j < p)[None, :], scores, float("-inf"))
            most, total, sums = _more(most, total, sums, scores, text_values, True)
        else:
            scores = tl.sum(x[:, None, :].to(tl.float32) * text_keys[None].to(tl.float32), 2)
            scores = tl.where((j < p)[None, :], scores, float("-inf"))
            most, total, sums = _more(most, total, sums, scores, text_values[None], False)

    for first in range(0, tl.minimum(ring, step + 1), SLOTS):  # written slots
        slot = first + tl.arange(0, SLOTS)
        back = ((step - slot) % ring + ring) % ring  # 0: the new position, counted above
        seen = (slot < ring) & (back <= step) & (back > 0)
        bias = tl.load(hole_bias + back, mask=seen, other=float("-inf")).to(tl.float32)
        states, held = (begin + slot[None, :] * C)[:, :, None] + c, there[:, :, None] & seen[None, :, None]
        held_keys = tl.load(keys + states, mask=held, other=0.0)
        held_values = tl.load(values + states, mask=held, other=0.0)
        scores = tl.sum(x[:, None, :].to(tl.float32) * held_keys.to(tl.float32), 2) + bias[None, :]
        most, total, sums = _more(most, total, sums, scores, held_values, False)

    given = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row[:, None] * h + head) * C + c, given, mask=there)
