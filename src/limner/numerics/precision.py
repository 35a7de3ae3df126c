"""Which number format a forward pass runs in, decided from outside the model.

Weights, gradients and optimiser state stay fp32; matrix products run in bf16 under `torch.autocast`
where the hardware multiplies bf16 natively: AMX or AVX512-BF16 on CPUs (measured 2.4x on a GPT step
with AMX), tensor cores since Ampere on GPUs. Elsewhere bf16 is emulated and slower than fp32, so
"auto" keeps fp32. bf16 has the exponent range of fp32, hence no loss scaling. The choice asks the
processor what it has; nothing is timed.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

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
