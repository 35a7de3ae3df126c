"""The one place where a linear layer's precision is chosen.

Models never name `nn.Linear`: they are given a factory. The default is a plain layer in the
precision of its surroundings (autocast decides).
"""

from collections.abc import Callable

from torch import nn

LinearFactory = Callable[[int, int], nn.Module]


def plain(n_in: int, n_out: int) -> nn.Module:
    """An ordinary `nn.Linear` with a bias."""
    return nn.Linear(n_in, n_out)
