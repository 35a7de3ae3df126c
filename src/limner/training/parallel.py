"""What processes that train one model do together, and the strategy of a process that trains alone.

Each of `world` ranks runs the same loop on its share of each batch. The seed alone fixes the order of samples; ranks
only divide it. Then

- losses, gradients and weights are those of one process on the whole batch, up to the order of sums, for objectives
  whose `shared` says what parts must know of the whole, or that are means over samples. The contrastive loss has the
  negatives of its own share, and `BalancedELB` balances the codes of its own share, as with micro-batches;
- what draws random numbers (dropout, gumbel noise) draws others on each rank, since ranks hold different samples: with
  it a run of two ranks is as good as that of one and not the same. Resumed with as many ranks a run is the same.

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
        """Shard or wrap it; what is called in its place."""
        ...

    def part(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch, the last of an update or an earlier one."""
        ...

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make each gradient the mean over ranks, where what `prepare` returned has not done so."""
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
