"""GPU types: vendor specifications, usual networks, and an assumed model FLOPs utilization (MFU)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Memory in bytes, dense 16-bit peak in FLOP/s, bandwidth of one GPU within its machine and to other machines in
    bytes/s, MFU of training, and support of bf16."""

    memory: float
    peak_flops: float
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    mfu: float
    bf16: bool = True


GPUS = {
    # memory, peak_flops, intra_node_bandwidth, inter_node_bandwidth, mfu
    "v100-16gb": GPU(16 * 2**30, 125e12, 150e9, 1.5e9, 0.35, bf16=False),
    "a100-80gb": GPU(80 * 2**30, 312e12, 300e9, 25e9, 0.45),
    "h100-80gb": GPU(80 * 2**30, 989e12, 450e9, 50e9, 0.4),
    "h200-141gb": GPU(141e9, 989e12, 450e9, 50e9, 0.4),
}
