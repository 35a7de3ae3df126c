"""What processes that train one model do together, and the strategy of a process that trains alone.

Each of `world` ranks runs the same loop on its share of each batch. The seed alone fixes the order of samples; ranks
only divide it. Then

- losses, gradients and weights are those of one process on the whole batch, up to the order of sums, if the objective
  is a mean over samples or its `shared` says what shares must know of the whole. The contrastive loss takes its
  negatives from the rank's own share, and `BalancedELB` balances the codes of that share, as with micro-batches;
- dropout and gumbel noise differ between ranks, since ranks hold different samples. With them a run on two ranks is
  equivalent to a run on one, but not equal. A run resumed on as many ranks as before is equal.

Every rank evaluates, on the same weights; the first one writes files, all ranks read them.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from limner.data.stream import hash64
from limner.training.trainable import Trainable


class Parallel(Protocol):
    """A strategy. All ranks call the same methods in the same order.

    Attributes:
        rank: of this process, from 0.
        world: how many processes there are.
    """

    rank: int
    world: int

    @property
    def is_main(self) -> bool:
        """Whether this process writes files: one of them does."""
        ...

    def divide(self, stream: Any) -> None:
        """Let the stream yield this rank's share of each batch."""
        ...

    def prepare(self, trainable: Trainable) -> nn.Module:
        """Shard or wrap it; returns the module to call instead."""
        ...

    def part(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch, the last of an update or an earlier one."""
        ...

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average each gradient over ranks, unless the module that `prepare` returned has done so."""
        ...

    def mean(self, values: Tensor) -> Tensor:
        """Elementwise mean over ranks."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether it is true on one rank at least."""
        ...

    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensor of each rank, all of one shape."""
        ...


class Single:
    """One process."""

    rank, world, is_main = 0, 1, True

    def divide(self, stream: Any) -> None:
        """The whole batch is its share."""

    def prepare(self, trainable: Trainable) -> nn.Module:
        return trainable

    def part(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Its gradients are the mean."""

    def mean(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, values: Tensor) -> list[Tensor]:
        return [values]


def folded(seed: int, rank: int) -> int:
    """The seed of a rank's random numbers; the first rank has that of a process that trains alone."""
    return int(hash64(seed, rank)) >> 1 if rank else seed
