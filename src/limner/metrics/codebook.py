"""How much of a codebook is in use."""

import torch
from jaxtyping import Int64, Num
from torch import Tensor


@torch.no_grad()
def usage(tokens: Int64[Tensor, "..."], vocab: int) -> dict[str, Num[Tensor, ""]]:
    """Codes that occur at least once, and the perplexity exp(entropy in nats) of their frequencies.

    Args:
        tokens: int64 of any shape, in [0, vocab).
    """
    counts = torch.bincount(tokens.flatten(), minlength=vocab).double()
    p = counts[counts > 0] / counts.sum()
    return {"codes": (counts > 0).sum(), "perplexity": (-(p * p.log()).sum()).exp()}
