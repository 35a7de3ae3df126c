"""Products of 8-bit integers, scaled back to floating point (Wortsman et al. 2023, §2.2.1, equations 2 and 4).

    y = scale_a scale_b^T * (a b^T) + bias

a b^T is summed in 32-bit integers, so it is exact, and all kernels give the same sums:

    reference   in fp64, which holds integers up to 2^53: readable, for any device and shape
    _int_mm     torch's: oneDNN on CPUs (VNNI, AMX), cuBLAS on GPUs, which takes only multiples of 8
    triton      ours (`triton_int8.py`), on GPUs where Triton is installed: scales and bias within the kernel

Some CPUs without VNNI add pairs of products in 16 bits, where 255 * 127 * 2 overflows. So `is_exact` tests `_int_mm`
before its first use on the largest magnitudes and, on CPUs, on small matrices in all layouts. If a sum is wrong, or a
kernel does not support a shape, the reference computes the product, counted with the reason (`kernel_counter.py`).

On a CPU a product is computed a few rows at a time, and scaled while its int32 sums are in the cache.
(`onednn.qlinear_pointwise` gives fp32 directly, but is not faster on unsigned inputs, needs reordered weights, and
takes minutes with signed inputs on CPUs for which it lacks a kernel.)

Shapes: m rows of inputs, n of weights, k summed over.
"""

from __future__ import annotations

import itertools
from functools import cache

import torch
from jaxtyping import Float, Int8, Int32, Shaped
from torch import Tensor

from limner import compat
from limner.numerics.compile_elementwise import triton_supports
from limner.quantization.kernel_counter import Product, count_product
from limner.quantization.vmap_loop import vmap_by_loop

_CPU_SUMS_PER_PART = 1 << 20  # int32 sums of a part of a product on a CPU: 4 MB
_MIN_ROWS_PER_PART = 64  # oneDNN reorders the weights for each part, so parts are not smaller
_MAX_K = (2**31 - 1) // 127**2  # largest k whose sums fit into 32 bits


def product(
    a: Int8[Tensor, "m k"],
    b: Int8[Tensor, "n k"],
    scale_a: Float[Tensor, ...],
    scale_b: Float[Tensor, ...],
    bias: Float[Tensor, " n"] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    counter: Tensor | None = None,
    role: Product = "forward",
) -> Float[Tensor, "m n"]:
    """Return scale_a scale_b^T * (a b^T) + bias, [m, n] in `dtype`.

    Args:
        a, b: int8 [m, k] and [n, k] without -128, with any strides.
        scale_a, scale_b: fp32 [m] or [], [n] or [].
        bias: [n].
        counter: `KernelCounter.id` of the counter of this product, if any.
        role: which of a layer's three products this is, for the counter.
    """
    return _product(a, b, scale_a, scale_b, bias, dtype, counter, role)


def reference(a: Int8[Tensor, "m k"], b: Int8[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """Return a b^T, exact integers in fp64."""
    return a.double() @ b.double().mT


def int32_sums(
    a: Int8[Tensor, "m k"], b: Int8[Tensor, "n k"], out: Int32[Tensor, "m n"] | None = None
) -> Int32[Tensor, "m n"]:
    """Return a b^T by `_int_mm`, in `out` if given."""
    return compat.int_mm(_gemm_operand(a), _gemm_operand(b.mT), out=out)


def row_major(x: Shaped[Tensor, "m k"]) -> Shaped[Tensor, "m k"]:
    """Return x with strides (k, 1). (`contiguous()` returns x itself if only the stride of a size-1 side differs.)"""
    return x if x.stride() == (x.shape[1], 1) else x.clone(memory_format=torch.contiguous_format)


def _gemm_operand(x: Shaped[Tensor, "m k"]) -> Shaped[Tensor, "m k"]:
    """Return x if its strides are those of a BLAS matrix, else a row-major copy.

    torch passes a matrix as rows if its last stride is 1, else as columns, and its other stride as the leading
    dimension. oneDNN rejects a leading dimension that is shorter than a row, as in a transposed column with the strides
    (1, 1); torch ignores that error and returns uninitialized memory (pytorch#195066).
    """
    (m, k), (row, column) = x.shape, x.stride()
    return x if (row >= k if column == 1 else row == 1 and column >= m) else row_major(x)


def select_kernel(a: Tensor, b: Tensor) -> tuple[str, str]:
    """Return the name of the kernel for a b^T, and why it is not the fast one ("" if it is)."""
    (m, k), n = a.shape, len(b)
    if k > _MAX_K:
        return "reference", f"sums of more than {_MAX_K:,} products may not fit into 32 bits"
    if triton_supports(a):
        return "triton", ""
    if a.device.type not in ("cpu", "cuda"):
        return "reference", f"no int8 kernel supports {a.device.type} tensors"
    if a.is_cuda and (m <= 16 or k % 8 or n % 8):
        return "reference", "_int_mm on a GPU needs more than 16 rows, and multiples of 8"
    if not is_exact(a.device):
        return "reference", "_int_mm is not exact on this device"
    return "_int_mm", ""


@cache
def is_exact(device: torch.device) -> bool:
    """Return True if `_int_mm` is exact on the device: for extreme numbers, random ones and small matrices."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-127, 128, (32, 256), dtype=torch.int8, generator=generator)
    a[:4], a[4:8] = 127, -127
    a[8:12, ::2], a[12:16, ::2] = 127, -127  # pairs of both signs
    a = a.to(device)
    pairs = [(a, a.flip(0))]
    if device.type == "cpu":  # only CPUs pass small products to `_int_mm`
        for m, n, k in itertools.product((1, 2, 3), repeat=3):
            pairs += itertools.product(_layouts(a[-m:, :k]), _layouts(a[16 : 16 + n, :k]))
    fill = torch.iinfo(torch.int32).max  # marks sums that a kernel does not write
    try:
        return all(
            torch.equal(
                int32_sums(x, y, a.new_full((len(x), len(y)), fill, dtype=torch.int32)).double(), reference(x, y)
            )
            for x, y in pairs
        )
    except RuntimeError:  # a GPU without `_int_mm`
        return False


def _layouts(x: Tensor) -> list[Tensor]:
    """Return copies of x in row-major and in column-major order."""
    rows, columns = (y.clone(memory_format=torch.contiguous_format) for y in (x, x.mT))
    return [rows, columns.mT]


@vmap_by_loop
@torch.library.custom_op("limner::int8_product", mutates_args=())
def _product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    counter: Tensor | None,
    role: str,
) -> Tensor:
    chosen, reason = select_kernel(a, b)
    count_product(counter, role, chosen, reason)
    if chosen == "triton":
        from limner.quantization import triton_int8

        return triton_int8.product(a, b, scale_a, scale_b, bias, dtype)
    y = torch.empty(len(a), len(b), dtype=dtype, device=a.device)
    if not y.numel():
        return y
    rows = max(_MIN_ROWS_PER_PART, _CPU_SUMS_PER_PART // len(b)) if a.device.type == "cpu" else len(a)
    buffer = torch.empty(min(rows, len(a)), len(b), dtype=torch.int32, device=a.device)
    by_row = scale_a[:, None] if scale_a.ndim else scale_a.expand(len(a), 1)
    by_row = by_row if scale_b.ndim else by_row * scale_b
    for part, part_scale, out in zip(a.split(rows), by_row.split(rows), y.split(rows), strict=True):
        exact = int32_sums(part, b, buffer[: len(part)]) if chosen == "_int_mm" else reference(part, b)
        scaled = out if dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        scaled.copy_(exact).mul_(part_scale)  # faster than one product of int32 and fp32
        if scale_b.ndim:
            scaled.mul_(scale_b)
        if bias is not None:
            scaled.add_(bias)
        if scaled is not out:
            out.copy_(scaled)
    return y


@_product.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: object, dtype: torch.dtype, counter: object, role: str
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)
