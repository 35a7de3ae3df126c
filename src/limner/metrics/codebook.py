"""Codebook usage."""

import torch
from jaxtyping import Int64, Num
from torch import Tensor


@torch.no_grad()
def usage(tokens: Int64[Tensor, "..."], vocab: int) -> dict[str, Num[Tensor, ""]]:
    """Number of codes that occur, and the perplexity exp(entropy in nats) of their frequencies.

    Args:
        tokens: int64 of any shape, in [0, vocab).
    """
    counts = torch.bincount(tokens.flatten(), minlength=vocab).double()
    entropy = torch.special.entr(counts / counts.sum()).sum()  # 0 for codes that do not occur
    return {"codes": (counts > 0).sum(), "perplexity": entropy.exp()}
