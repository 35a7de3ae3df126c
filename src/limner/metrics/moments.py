"""Mean and covariance of features in float64, streamed over batches and merged over processes.

Sums of squared deviations are merged with the means (Chan, Golub & LeVeque 1979), which keeps the precision that the
difference of raw moments would lose.

Shapes: N pictures, D features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from limner.atomic_io import require_file
from limner.errors import UserError

_ROWS_PER_BATCH = 4_096
MAX_FILE_BYTES = 1 << 28  # statistics of Inception's 2,048 features have 34 MB


@dataclass(frozen=True)
class Moments:
    """Number, mean and sum of squared deviations of features."""

    count: int
    mean: Float64[Tensor, " D"]
    scatter: Float64[Tensor, "D D"]

    @classmethod
    def of(cls, batches: Tensor | Iterable[Tensor]) -> Moments:
        """Return the moments of features [N, D], or of batches of them, one in memory at a time.

        Raises `UserError` without pictures, and for features that are not finite or differ in number.
        """
        moments: Moments | None = None
        for batch in [batches] if isinstance(batches, Tensor) else batches:
            for rows in batch.split(_ROWS_PER_BATCH) if len(batch) else ():
                part = cls._of_rows(rows)
                moments = part if moments is None else moments + part
        if moments is None:
            raise UserError("a set of features is empty: give pictures on both sides")
        if not moments.mean.isfinite().all():
            raise UserError("features are not finite: check the weights of the extractor")
        return moments

    @classmethod
    def _of_rows(cls, rows: Float[Tensor, "N D"]) -> Moments:
        x = rows.double()
        mean = x.mean(0)
        x = x - mean
        return cls(len(x), mean, x.T @ x)

    @classmethod
    def from_file(cls, path: str | Path) -> Moments:
        """Return `mu` [D] and `sigma` [D, D] of an .npz file of pytorch-fid, which lacks the number of pictures.

        Runs no code of the file. Raises `UserError` for other files.
        """
        path = Path(path)
        require_file(path)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError("too large")
            with np.load(path, allow_pickle=False) as file:
                mean, covariance = (torch.from_numpy(np.asarray(file[name], np.float64)) for name in ("mu", "sigma"))
            if mean.ndim != 1 or covariance.shape != 2 * mean.shape or not len(mean):
                raise ValueError("mu and sigma have other shapes")
            if not (mean.isfinite().all() and torch.allclose(covariance, covariance.T)):
                raise ValueError("not finite, or sigma is not symmetric")
        except Exception as error:  # a damaged archive makes numpy's reader fail in any way
            raise UserError(
                f"{path} does not hold statistics of features, mu [D] and sigma [D, D] ({type(error).__name__}): write "
                "them with `pytorch-fid --save-stats`"
            ) from None
        return cls(2, mean, covariance)  # of 2 pictures, the covariance is the scatter

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both sets together. Raises `UserError` if their numbers of features differ."""
        require_equal_sizes(self, other)
        count, delta = self.count + other.count, other.mean - self.mean
        scatter = self.scatter + other.scatter + torch.outer(delta, delta) * (self.count * other.count / count)
        return Moments(count, self.mean + delta * (other.count / count), scatter)

    @property
    def covariance(self) -> Float64[Tensor, "D D"]:
        """The unbiased covariance; not defined for a single picture."""
        return self.scatter / (self.count - 1)


def require_equal_sizes(a: Moments, b: Moments) -> None:
    """Raise `UserError` if the moments are of different numbers of features."""
    if len(a.mean) != len(b.mean):
        raise UserError(
            f"one set has {len(a.mean):,} features and the other {len(b.mean):,}: use one extractor for both"
        )
