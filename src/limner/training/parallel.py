"""What processes that train one model do together, and the strategy of a process that trains alone.

Each of `world` ranks runs the same loop on its share of each batch. The seed alone fixes the order of samples; ranks
only divide it. Then

- losses, gradients and weights are those of one process on the whole batch, up to the order of sums, if the objective
  is a mean over samples, or says what shares must know of the whole (`shared`), or joins what they compute (`across`:
  the contrastive loss takes its negatives from all ranks, and `BalancedELB` balances the codes of all);
- dropout and gumbel noise differ between ranks, since ranks hold different samples. With them a run on two ranks is
  equivalent to a run on one, but not equal. A run resumed on as many ranks as before is equal.

Every rank evaluates, on the same weights; the first one writes files, all ranks read them. Checkpoints are written by
all ranks together.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from limner.data.stream import hash64
from limner.optim.grad_access import unscale_all
from limner.training.checkpoint import Checkpointer, Files
from limner.training.train_module import Trainable


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

    def first(self) -> AbstractContextManager[object]:
        """A block for the rank that writes files; the others run it when that one is through."""
        ...

    def checkpointer(self, files: Files) -> Checkpointer:
        """What keeps the states of all ranks as checkpoints among these files."""
        ...

    def divide(self, stream: Any) -> None:
        """Let the stream yield this rank's share of each batch."""
        ...

    def building(self) -> AbstractContextManager[object]:
        """A block in which all ranks build a model for `prepare`. Its weights may be in shards from the start, with the
        values that one process would draw; whoever reads or changes them goes by `optim/dtensor.py`."""
        ...

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Move it to the device, sharded or wrapped as the strategy needs it; the device need not have room for all
        weights. Returns the module to call instead. `dtype` is what autocast will compute its products in."""
        ...

    def describe(self) -> str:
        """What it does with the gradients of what it has prepared, in a sentence; "" if nobody need be told."""
        ...

    def part(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch, the last of an update or an earlier one."""
        ...

    def gathered(self) -> AbstractContextManager[object]:
        """A block in which the model's own methods may be called, by all ranks together. Outside of it the weights may
        be sharded, and only a call of the module that `prepare` returned gathers them."""
        ...

    def unscale(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        """Have `reduce` divide the gradients of these parameters by `scale` from now on, a tensor [] that the backward
        pass multiplies them with, and whose value may change between steps. None ends that."""
        ...

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average each gradient over ranks, unless the module that `prepare` returned has done so."""
        ...

    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these, which `reduce` has averaged, will not be applied: what came in them of earlier steps
        must not be lost."""
        ...

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises `UserError` if ranks whose weights must be the same have others: a reduction has been forgotten, say,
        and they drift apart."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of it, by name, the same on all ranks or in shards."""
        ...

    def errors(self) -> dict[str, Tensor]:
        """What it must hold of each replica: error buffers of compressed gradients, by parameter."""
        ...

    def load(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """The inverse; tensors are on the CPU, whole or in shards. `errors` are those of this replica or, where there
        was another number, of each that there was. Raises `UserError` if they do not fit."""
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

    def join(self, values: Tensor) -> Tensor:
        """The rows of all ranks, in their order. A gradient flows back to the rank that a row is from, as a sum over
        the ranks' losses."""
        ...


class Single:
    """One process."""

    rank, world, is_main = 0, 1, True

    def __init__(self) -> None:
        self._scales: dict[Tensor, Tensor | None] = {}

    def first(self) -> AbstractContextManager[object]:
        return nullcontext()

    def checkpointer(self, files: Files) -> Checkpointer:
        return files

    def divide(self, stream: Any) -> None:
        """The whole batch is its share."""

    def building(self) -> AbstractContextManager[object]:
        return nullcontext()

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        self._scales = {}
        return trainable.to(device)

    def describe(self) -> str:
        return ""

    def part(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def gathered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def unscale(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        self._scales |= dict.fromkeys(parameters, scale)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Its gradients are the mean."""
        unscale_all(self._scales)

    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Its gradients are of one step."""

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """It agrees with itself."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def errors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """It keeps nothing."""

    def mean(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, values: Tensor) -> list[Tensor]:
        return [values]

    def join(self, values: Tensor) -> Tensor:
        return values


def folded(seed: int, rank: int = 0, step: int = 0) -> int:
    """The seed of a rank's random numbers that begin at a step; the first rank has from the start that of a process
    which trains alone. All 63 bits of `seed` count, where a generator on the CPU reads the lower 32."""
    return int(hash64(seed, rank, step)) >> 1 if rank or step or seed >= 2**32 else seed
