"""Products of matrices in eight bits, scaled back to floating point (Wortsman et al. 2023, §2.2.1, equations 2 and 4).

    y = scale_a scale_b^T * (a b^T) + bias

Integer products are summed in 32-bit integers, so they are exact, and all kernels give the same sums:

    reference   in fp64, which holds integers up to 2^53: readable, for any device and shape
    _int_mm     torch's: oneDNN on CPUs (VNNI, AMX), cuBLAS on GPUs, which takes only multiples of 8
    triton      ours (`triton_int8.py`), on GPUs where Triton is installed: scales and bias within the kernel

Some CPUs without VNNI add pairs of products in 16 bits, where 255 * 127 * 2 overflows. So `is_exact` tests `_int_mm`
before its first use on the largest magnitudes and, on CPUs, on small matrices in all layouts. If a sum is wrong, or a
kernel does not support a shape, the reference computes the product.

On a CPU an integer product is computed a few rows at a time, and scaled while its int32 sums are in the cache.
(`onednn.qlinear_pointwise` gives fp32 directly, but is not faster, and takes minutes on CPUs for which it lacks a
kernel.)

float8 products:

    _scaled_mm  torch's, on GPUs from compute capability 8.9 on
    simulated   in bf16 or fp32, which hold each float8 number exactly, summed in fp32: the paper's simulation. It
                reproduces the accuracy of float8 training, not its speed

An unsupported shape, a missing library or a compiler that replaced a layer would go unnoticed. So each product chooses
its kernel, runs it and counts it in one operation that is opaque to `torch.compile` and autograd. Every execution
counts, also in evaluation and when checkpointing recomputes a forward product. A replayed CUDA graph counts nothing.

Shapes: m rows of inputs, n of weights, k summed over.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from limner import compat
from limner.numerics import precision
from limner.numerics.compile_elementwise import triton_supports
from limner.quantization.quantize import vmap_by_loop

_CPU_SUMS_PER_PART = 1 << 20  # int32 sums of a part of a product on a CPU: 4 MB
_MIN_ROWS_PER_PART = 64  # oneDNN reorders the weights for each part, so parts are not smaller
_MAX_K = (2**31 - 1) // 127**2  # largest k whose sums fit into 32 bits

Product = Literal["forward", "input gradient", "weight gradient"]
Counts = Counter[tuple[str, str, str]]  # by product, kernel, and fallback reason ("" for the fast kernel)

_ids = itertools.count(1)
_counters: WeakValueDictionary[int, KernelCounter] = WeakValueDictionary()


class KernelCounter:
    """The counts of one layer. A copy of the layer starts at zero.

    Attributes:
        id: key of the counter for custom operations, which take no Python objects: int64 [] on the CPU. For an `int`,
            `torch.compile` would compile each layer of a model separately, and stop after eight.
        counts: number of products by product, kernel and reason.
    """

    def __init__(self) -> None:
        counter_id = next(_ids)
        self.id = torch.tensor(counter_id, device="cpu")
        self.counts: Counts = Counter()
        _counters[counter_id] = self

    def __deepcopy__(self, memo: object) -> KernelCounter:
        return KernelCounter()

    def __reduce__(self) -> tuple[type[KernelCounter], tuple[()]]:
        return KernelCounter, ()


def _count(counter_id: Tensor | None, product: str, kernel: str, fallback_reason: str = "") -> None:
    if counter_id is not None and (counter := _counters.get(int(counter_id))) is not None:
        counter.counts[product, kernel, fallback_reason] += 1


def counts_to_json(counts: Counts) -> list[dict[str, Any]]:
    """Return counts as JSON values."""
    return [
        {"product": product, "kernel": kernel, "fallback_reason": reason, "count": n}
        for (product, kernel, reason), n in sorted(counts.items())
    ]


def counts_from_json(rows: Iterable[Mapping[str, Any]]) -> Counts:
    """Invert `counts_to_json`. Raises `KeyError`, `TypeError` or `ValueError` for malformed rows."""
    return Counter({(str(x["product"]), str(x["kernel"]), str(x["fallback_reason"])): int(x["count"]) for x in rows})


@vmap_by_loop
@torch.library.custom_op("limner::product_8bit", mutates_args=())
def product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    counter: Tensor | None = None,
    role: str = "forward",
) -> Tensor:
    """Return scale_a scale_b^T * (a b^T) + bias, [m, n] in `dtype`.

    Args:
        a, b: [m, k] and [n, k] with any strides, both int8 without -128, or both float8.
        scale_a, scale_b: fp32 [m] or [], [n] or [].
        bias: [n].
        counter: `KernelCounter.id` of the counter of this product, if any.
        role: which `Product` of a layer this is, for the counter.
    """
    kernel, reason = select_kernel(a, b)
    _count(counter, role, kernel, reason)
    if kernel == "triton":
        from limner.quantization import triton_int8

        return triton_int8.product(a, b, scale_a, scale_b, bias, dtype)
    if kernel in ("reference", "_int_mm"):
        return _product_by_parts(kernel == "_int_mm", a, b, scale_a, scale_b, bias, dtype)
    if kernel == "simulated":
        matmul_dtype = precision.Auto().dtype(a.device)
        with torch.autocast(a.device.type, enabled=False):
            y = precision.product(a.to(matmul_dtype), b.to(matmul_dtype).mT)
        y = y * (scale_a[:, None] if scale_a.ndim else scale_a) * scale_b
    elif scale_a.ndim or scale_b.ndim:  # `_scaled_mm` then needs row scales of both and gives bf16
        by_row, by_column = scale_a.expand(len(a)).contiguous(), scale_b.expand(len(b)).contiguous()
        y = compat.scaled_mm(row_major(a), row_major(b).mT, by_row[:, None], by_column[None], out_dtype=torch.bfloat16)
    else:
        y = compat.scaled_mm(row_major(a), row_major(b).mT, scale_a, scale_b, out_dtype=dtype)
    return (y if bias is None else y + bias).to(dtype)


@product.register_fake
def _(a: Tensor, b: Tensor, scale_a: object, scale_b: object, bias: object = None, dtype: torch.dtype = torch.float32,
      counter: object = None, role: str = "forward") -> Tensor:  # fmt: skip
    return a.new_empty(len(a), len(b), dtype=dtype)


def select_kernel(a: Tensor, b: Tensor) -> tuple[str, str]:
    """Return the name of the kernel for a b^T, and why it is not the fast one ("" if it is)."""
    (m, k), n = a.shape, len(b)
    if a.dtype != torch.int8:
        if not a.is_cuda or torch.cuda.get_device_capability(a.device) < (8, 9):
            return "simulated", "this device cannot multiply float8"
        return ("simulated", "_scaled_mm needs multiples of 16") if k % 16 or n % 16 else ("_scaled_mm", "")
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


@vmap_by_loop
@torch.library.custom_op("limner::weight_gradient", mutates_args=())
def weight_gradient(g: Tensor, x: Tensor, counter: Tensor) -> Tensor:
    """Return g^T x, fp32 [m, n], computed in 16 bits: the product that SwitchBack keeps in higher precision.

    g is [b, m], x [b, n]. On a GPU the format is that of x if it has 16 bits. Otherwise it is bf16 where the hardware
    multiplies bf16 faster than fp32 (`numerics/precision.py`) and x is not fp16, else fp32. Sums are fp32, then rounded
    to that format, as for `nn.Linear` under autocast.
    """
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        dtype = x.dtype
    else:  # CPUs lack a fast fp16 product, and bf16 would round fp16 values
        dtype = torch.float32 if x.dtype == torch.float16 else precision.Auto().dtype(x.device)
    _count(counter, "weight gradient", str(dtype).removeprefix("torch."))
    with torch.autocast(x.device.type, enabled=False):
        return (g.to(dtype).mT @ x.to(dtype)).float()


@weight_gradient.register_fake
def _(g: Tensor, x: Tensor, counter: Tensor) -> Tensor:
    return g.new_empty(g.shape[1], x.shape[1], dtype=torch.float32)


def reference(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T of int8 matrices [m, k] and [n, k], exact integers in fp64."""
    return a.double() @ b.double().mT


def int32_sums(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a b^T of int8 matrices [m, k] and [n, k] by `_int_mm`, int32 [m, n], in `out` if given."""
    return compat.int_mm(_gemm_operand(a), _gemm_operand(b.mT), out=out)


def row_major(x: Tensor) -> Tensor:
    """Return x [m, k] with strides (k, 1). (`contiguous()` returns x itself if only the stride of a size-1 side
    differs.)"""
    return x if x.stride() == (x.shape[1], 1) else x.clone(memory_format=torch.contiguous_format)


def _gemm_operand(x: Tensor) -> Tensor:
    """Return x [m, k] if its strides are those of a BLAS matrix, else a row-major copy.

    torch passes a matrix as rows if its last stride is 1, else as columns, and its other stride as the leading
    dimension. oneDNN rejects a leading dimension that is shorter than a row, as in a transposed column with the strides
    (1, 1); torch ignores that error and returns uninitialized memory (pytorch#195066).
    """
    (m, k), (row, column) = x.shape, x.stride()
    return x if (row >= k if column == 1 else row == 1 and column >= m) else row_major(x)


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
            x, y = a[-m:, :k], a[16 : 16 + n, :k]
            pairs += itertools.product((row_major(x), row_major(x.mT).mT), (row_major(y), row_major(y.mT).mT))
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


def _product_by_parts(
    fast: bool, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `product` of int8 matrices with sums by `_int_mm` or the reference; on a CPU, a few rows at a time."""
    y = torch.empty(len(a), len(b), dtype=dtype, device=a.device)
    if not y.numel():
        return y
    rows = max(_MIN_ROWS_PER_PART, _CPU_SUMS_PER_PART // len(b)) if a.device.type == "cpu" else len(a)
    buffer = torch.empty(min(rows, len(a)), len(b), dtype=torch.int32, device=a.device)
    by_row = scale_a[:, None] if scale_a.ndim else scale_a.expand(len(a), 1)
    by_row = by_row if scale_b.ndim else by_row * scale_b
    for part, part_scale, out in zip(a.split(rows), by_row.split(rows), y.split(rows), strict=True):
        scaled = out if dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        exact = int32_sums(part, b, buffer[: len(part)]) if fast else reference(part, b)
        scaled.copy_(exact).mul_(part_scale)  # faster than one product of int32 and fp32
        if scale_b.ndim:
            scaled.mul_(scale_b)
        if bias is not None:
            scaled.add_(bias)
        if scaled is not out:
            out.copy_(scaled)
    return y
