"""Readers of checkpoints for tests."""

from pathlib import Path

from torch import Tensor

from limner.training.checkpoint import read_groups


def read_tensors(checkpoint: Path, group: str) -> dict[str, Tensor]:
    """The tensors of one group, whole and on the CPU."""
    return read_groups(checkpoint, (group,))[group]
