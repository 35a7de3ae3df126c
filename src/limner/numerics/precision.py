"""Precisions: the number formats of a model's training and inference, chosen outside the model.

A precision converts a model once, before training is prepared (`apply`), and sets the format of matrix products
(`autocast`). The precisions of this module keep the model unchanged: weights, gradients and optimizer state are fp32.
`Auto` runs matrix products in bf16 under `torch.autocast` where the hardware multiplies bf16 faster than fp32: AMX on
CPUs (measured 2.4x on a GPT step), AMD's processors since Zen 4 (1.2 to 2.2x on our training steps), tensor cores since
Ampere on GPUs. Elsewhere, also with AVX512-BF16 of other makers (a training step of a small prior takes 1.3 to 1.4
times as long), `Auto` keeps fp32. bf16 has the exponent range of fp32, hence no loss scaling. `Auto` reads the
processor's features and times nothing, so that a resumed run keeps its format.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from limner import compat
from limner.numerics.formats import HALF_FORMATS

__all__ = ["Auto", "Bf16", "Fp16", "Fp32", "Precision", "acc_type", "has_fast_bf16", "product", "upcast"]


@dataclass(frozen=True, kw_only=True)
class Fp32:
    """Single precision throughout. `converts` is True for precisions that change layers."""

    converts: ClassVar[bool] = False
    format: ClassVar[torch.dtype] = torch.float32

    def dtype(self, device: torch.device | str) -> torch.dtype:
        """Return the number format of large matrix products."""
        return self.format

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert the layers of a model in place, if the precision does so, and return the model."""
        return model

    def autocast(self, device: torch.device | str) -> AbstractContextManager[object]:
        """Context of the forward pass, in which matrix products run in `dtype`; a null context for fp32.

        Autocast's cache of 16-bit weights is off: with checkpointing or shards, it would hold the copies of all blocks
        together.
        """
        dtype, kind = self.dtype(device), torch.device(device).type
        return nullcontext() if dtype == torch.float32 else torch.autocast(kind, dtype=dtype, cache_enabled=False)


class Bf16(Fp32):
    """Matrix products in bf16."""

    format = torch.bfloat16


class Fp16(Fp32):
    """Matrix products in fp16, whose gradients need a scale (`TrainConfig.scaling`)."""

    format = torch.float16


class Auto(Fp32):
    """Matrix products in bf16 where the hardware multiplies it faster than fp32."""

    def dtype(self, device: torch.device | str) -> torch.dtype:
        return torch.bfloat16 if has_fast_bf16(torch.device(device)) else torch.float32


Precision = Auto | Bf16 | Fp16 | Fp32


def has_fast_bf16(device: torch.device) -> bool:
    """Return True if `device` multiplies bf16 matrices faster than fp32 ones."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    has = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.11
    amd = has.get("sse4a", False)  # only AMD has SSE4a
    return compat.is_amx_tile_supported() or (amd and has.get("avx512_bf16", False))


def acc_type(*dtypes: torch.dtype) -> torch.dtype:
    """Return the format that accumulates numbers of these formats: fp64 if one is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def upcast(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged in fp64."""
    return x.to(acc_type(x.dtype))


@torch.library.custom_op("limner::product", mutates_args=())  # torch.compile cannot trace the setting below
def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of matrices [..., n, m] and [..., m, k], summed and returned in fp32; in fp64 if either is fp64.

    `@` rounds the sums to the 16 bits of its inputs. bf16 keeps eight binary digits, so a logit of 20 would be off by
    up to 0.06 (App. D.2 of Ramesh et al. 2021 keeps logits in 32 bits).
    """
    result = acc_type(a.dtype, b.dtype)
    if a.device.type == "cuda" and a.dtype == b.dtype in HALF_FORMATS:
        flat = (x.reshape(-1, *x.shape[-2:]) for x in (a, b))
        return torch.bmm(*flat, out_dtype=result).view(*a.shape[:-1], b.shape[-1])
    if not a.dtype == b.dtype == torch.bfloat16:
        return a.to(result) @ b.to(result)
    setting: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"  # the values are exact in bf16: oneDNN multiplies in bf16 and sums in fp32
    try:
        return a.float() @ b.float()
    finally:
        setting.fp32_precision = before


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=acc_type(a.dtype, b.dtype))
