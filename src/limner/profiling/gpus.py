"""Kinds of GPUs: the makers' figures, the network of the usual machines, and the share of the peak that training
reaches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GPU:
    """Memory in bytes, the maker's dense 16-bit rate in FLOP/s, bytes/s that one GPU exchanges within its machine and
    with other machines, the share of the rate that is reached, and whether the 16 bits may be bf16's."""

    memory: float
    rate: float
    within: float
    between: float
    share: float
    bf16: bool = True


GPUS = {
    "v100-16gb": GPU(memory=16 * 2**30, rate=125e12, within=150e9, between=1.5e9, share=0.35, bf16=False),
    "a100-80gb": GPU(memory=80 * 2**30, rate=312e12, within=300e9, between=25e9, share=0.45),
    "h100-80gb": GPU(memory=80 * 2**30, rate=989e12, within=450e9, between=50e9, share=0.4),
    "h200-141gb": GPU(memory=141e9, rate=989e12, within=450e9, between=50e9, share=0.4),
}
