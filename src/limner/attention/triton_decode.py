"""`LayerKVCache.append` as one Triton kernel: attention from one position to the text and to the cache, for GPUs.

In torch operations this takes some thirty small kernels for each layer of each step, which take longer than reading the
weights of a model with a billion parameters. Here one program handles a head and some candidates of a caption, which
share the text's keys and values. One softmax runs over text and image in blocks, in fp32 (Milakov & Gimelshein 2018).

This module is imported only with a GPU, or by tests under Triton's interpreter.

Shapes: B captions, M rows (as many for each caption), H heads, P prefix, C head width; L lanes with a ring each.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# Triton turns the arguments of its functions into constants.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_CANDIDATES = 16  # per program: they share a product with the text, on tensor cores
KEYS_PER_BLOCK = 64  # text keys per block
SLOTS_PER_BLOCK, WARPS = {1: 32, _CANDIDATES: 8}, {1: 4, _CANDIDATES: 8}  # by candidates, as registers allow


def attend(
    position: Tensor, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor], rings: tuple[Tensor, Tensor],
    gap_bias: Tensor,
) -> Tensor:  # fmt: skip
    """Write k and v [M, H, 1, C] at the image's `position`, int64 [1]; return its attention output [M, H, 1, C].

    `prefix` holds keys and values [B, H, P, C], `rings` the image's keys and values [L, M, H, ring, C].
    """
    (m, h, _, c), (b, _, p, _) = q.shape, prefix[0].shape
    lanes, ring = len(rings[0]), len(gap_bias)
    n = m // b
    out = torch.empty(m, 1, h, c, dtype=q.dtype, device=q.device).transpose(1, 2)
    candidates = 1 if n == 1 else _CANDIDATES
    launch: Any = attend_kernel[b * triton.cdiv(n, candidates), h]
    launch(
        position, q, k, v, *prefix, *rings, gap_bias, out, n, p, ring, lanes, h, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), rings[0].stride(0), rings[0].stride(1), c**-0.5, C=c,
        CANDIDATES=candidates, KEYS=KEYS_PER_BLOCK, SLOTS=SLOTS_PER_BLOCK[candidates], num_warps=WARPS[candidates],
    )  # fmt: skip
    return out


def supports(x: Tensor, *others: Tensor) -> bool:
    """Return True if the kernel supports format, head width C and strides of states, keys and values [..., C]."""
    c, fits = x.shape[-1], x.dtype != torch.float64  # scores are fp32
    return fits and c >= 16 and c & (c - 1) == 0 and all(y.stride(-1) == 1 and y.dtype == x.dtype for y in (x, *others))


@triton.jit
def _update_softmax(maximum, total, sums, scores, values, SHARED_VALUES: tl.constexpr):
    """Update a running softmax (largest score [m], sum [m], weighted values [m, C]) with more keys: scores [m, j],
    values [j, C] shared by all rows or [m, j, C]."""
    largest = tl.maximum(maximum, tl.max(scores, 1))
    rescale, weights = tl.exp(maximum - largest), tl.exp(scores - largest[:, None])
    if SHARED_VALUES:
        output = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    else:
        output = tl.sum(weights[:, :, None] * values.to(tl.float32), 1)
    return largest, total * rescale + tl.sum(weights, 1), sums * rescale[:, None] + output


@triton.jit
def attend_kernel(
    position, q, k, v, prefix_keys, prefix_values, keys, values, gap_bias, out, n, p, ring, lanes, h,
    q_row, q_head, k_row, k_head, v_row, v_head, lane_stride, row_stride, scale,
    C: tl.constexpr, CANDIDATES: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program for a head and `CANDIDATES` of a caption's `n` candidates."""
    blocks = tl.cdiv(n, CANDIDATES)
    caption, head = tl.program_id(0) // blocks, tl.program_id(1)
    candidate = tl.program_id(0) % blocks * CANDIDATES + tl.arange(0, CANDIDATES)
    in_bounds, row, c = (candidate < n)[:, None], (caption * n + candidate).to(tl.int64), tl.arange(0, C)
    position_value = tl.load(position)
    lane, step = position_value % lanes, position_value // lanes
    row_start = (lane * lane_stride + row * row_stride + head.to(tl.int64) * ring * C)[:, None]

    x = tl.load(q + row[:, None] * q_row + head * q_head + c, mask=in_bounds, other=0.0)
    x = (x.to(tl.float32) * scale).to(x.dtype)
    key = tl.load(k + row[:, None] * k_row + head * k_head + c, mask=in_bounds, other=0.0)
    value = tl.load(v + row[:, None] * v_row + head * v_head + c, mask=in_bounds, other=0.0)
    new_slot = row_start + step % ring * C + c
    tl.store(keys + new_slot, key, mask=in_bounds)
    tl.store(values + new_slot, value, mask=in_bounds)
    maximum = tl.sum(x.to(tl.float32) * key.to(tl.float32), 1)
    total, sums = tl.full((CANDIDATES,), 1.0, tl.float32), value.to(tl.float32)

    text = (caption * h + head).to(tl.int64) * p * C
    for start in range(0, p, KEYS):
        j = start + tl.arange(0, KEYS)
        offset, in_prefix = text + j[:, None] * C + c, (j < p)[:, None]
        text_keys = tl.load(prefix_keys + offset, mask=in_prefix, other=0.0)
        text_values = tl.load(prefix_values + offset, mask=in_prefix, other=0.0)
        if CANDIDATES > 1:
            scores = tl.dot(x, text_keys.T, input_precision="ieee")
            scores = tl.where((j < p)[None, :], scores, float("-inf"))
            maximum, total, sums = _update_softmax(maximum, total, sums, scores, text_values, True)
        else:
            scores = tl.sum(x[:, None, :].to(tl.float32) * text_keys[None].to(tl.float32), 2)
            scores = tl.where((j < p)[None, :], scores, float("-inf"))
            maximum, total, sums = _update_softmax(maximum, total, sums, scores, text_values[None], False)

    for first in range(0, tl.minimum(ring, step + 1), SLOTS):  # written slots
        slot = first + tl.arange(0, SLOTS)
        back = ((step - slot) % ring + ring) % ring  # 0: the new position, counted above
        visible = (slot < ring) & (back <= step) & (back > 0)
        bias = tl.load(gap_bias + back, mask=visible, other=float("-inf")).to(tl.float32)
        slots, mask = (row_start + slot[None, :] * C)[:, :, None] + c, in_bounds[:, :, None] & visible[None, :, None]
        ring_keys = tl.load(keys + slots, mask=mask, other=0.0)
        ring_values = tl.load(values + slots, mask=mask, other=0.0)
        scores = tl.sum(x[:, None, :].to(tl.float32) * ring_keys.to(tl.float32), 2) + bias[None, :]
        maximum, total, sums = _update_softmax(maximum, total, sums, scores, ring_values, False)

    output = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row[:, None] * h + head) * C + c, output, mask=in_bounds)
