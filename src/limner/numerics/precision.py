"""Which number format a forward pass runs in, decided from outside the model.

Weights, gradients and optimiser state stay fp32; matrix products run in bf16 under `torch.autocast`
where the hardware multiplies bf16 natively: AMX or AVX512-BF16 on CPUs (measured 2.4x on a GPT step
with AMX), tensor cores since Ampere on GPUs. Elsewhere bf16 is emulated and slower than fp32, so
"auto" keeps fp32. bf16 has the exponent range of fp32, hence no loss scaling. The choice asks the
processor what it has; nothing is timed.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["auto", "bf16", "fp32"]


def choose_precision(device: torch.device | str = "cpu", precision: Precision = "auto") -> torch.dtype:
    """The dtype for autocast on `device`: `torch.bfloat16` or `torch.float32`."""
    if precision == "auto":
        return torch.bfloat16 if has_fast_bf16(torch.device(device)) else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]


def autocast(device: torch.device | str, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Context in which matrix products run in `dtype`; no context at all for fp32."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype)


def has_fast_bf16(device: torch.device) -> bool:
    """True where `device` multiplies bf16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@torch.library.custom_op(
    "limner::product", mutates_args=()
)  # one operation to torch.compile, which cannot see a setting
def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of 16-bit (or 32-bit) matrices [..., n, m] and [..., m, k], summed and given in fp32.

    `@` rounds the sums to the 16 bits of its inputs, eight of which are bf16's digits: a logit of 20 would be off by up
    to 0.06 (App. D.2 of Ramesh et al. 2021 keeps logits in 32 bits).
    """
    if a.dtype == b.dtype == torch.float32:
        return a @ b
    if a.device.type == "cuda":
        flat = (x.reshape(-1, *x.shape[-2:]) for x in (a, b))
        return torch.bmm(*flat, out_dtype=torch.float32).view(*a.shape[:-1], b.shape[-1])
    setting: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"  # oneDNN multiplies fp32 numbers as bf16, which these are, and sums in fp32
    try:
        return a.float() @ b.float()
    finally:
        setting.fp32_precision = before


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)
