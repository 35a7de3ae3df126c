"""The interface of strategies for parallel training, and the strategy of a single process.

Each of `world_size` ranks runs the same loop on its share of each batch. The seed alone fixes the order of samples;
ranks only divide it. Consequences:

- Losses, gradients and weights equal those of one process on the whole batch, up to the order of sums. The objective
  must be a mean over samples, or provide values of the whole batch (`batch_stats`), or join the ranks' results
  (`gathered`: the contrastive loss takes negatives from all ranks, and `BalancedELB` balances the codes of all ranks).
- Dropout and gumbel noise differ between ranks, because ranks hold different samples. With such noise a run on two
  ranks is equivalent to a run on one, but not equal. A run resumed on the same number of ranks is equal.

Every rank evaluates, on the same weights. The first rank writes files, and all ranks read them. All ranks write
checkpoints together.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from limner.data.stream import splitmix64
from limner.optim.grad_access import unscale_all
from limner.training.checkpoint import Checkpointer, LocalCheckpointer
from limner.training.train_module import Trainable


class Parallel(Protocol):
    """A strategy for training on several processes. All ranks call the same methods in the same order.

    Attributes:
        rank: rank of this process, from 0.
        world_size: number of processes.
    """

    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files."""
        ...

    def main_first(self) -> AbstractContextManager[object]:
        """Return a context manager whose block the writing rank runs first, the others after it."""
        ...

    def checkpointer(self, files: LocalCheckpointer) -> Checkpointer:
        """Return a checkpointer that keeps the states of all ranks in `files`."""
        ...

    def shard_stream(self, stream: Any) -> None:
        """Make the stream yield this rank's share of each batch."""
        ...

    def init_context(self) -> AbstractContextManager[object]:
        """Return a context manager in which all ranks build a model for `prepare`. Its weights may be sharded, with the
        values that one process would draw; use `optim/dtensor.py` to read or change them."""
        ...

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Move the module to the device, and shard or wrap it; return the module to call instead. The device need
        not hold all weights. `dtype` is the format of matrix products under autocast."""
        ...

    def summary(self) -> str:
        """Return a sentence for the log on the reduction of gradients, or ""."""
        ...

    def microbatch(self, last: bool) -> AbstractContextManager[object]:
        """Return a context manager for a micro-batch; `last` marks the last of an update."""
        ...

    def unsharded(self) -> AbstractContextManager[object]:
        """Return a context manager in which all ranks together may call the model's methods. Outside of it weights may
        be sharded, and only a call of the module that `prepare` returned gathers them."""
        ...

    def set_grad_scale(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        """Make `reduce` divide the gradients of these parameters by `scale`, the factor [] of the backward pass, whose
        value may change between steps. None ends the division."""
        ...

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average each gradient over ranks, unless the backward pass has done so."""
        ...

    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add averaged gradients that the update leaves out to the error buffers: they contain earlier residuals."""
        ...

    def assert_replicas_equal(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise `UserError` if weights differ between ranks that must hold the same ones."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the strategy's state for a checkpoint by name, the same on all ranks or sharded."""
        ...

    def error_buffers(self) -> dict[str, Tensor]:
        """Return this replica's error buffers of compressed gradients for a checkpoint, by parameter."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """Load the state from CPU tensors, whole or sharded. `errors` holds the buffers of this replica or, if the
        number of replicas has changed, of each saved replica. Raises `UserError` if a shape differs."""
        ...

    def mean(self, values: Tensor) -> Tensor:
        """Return the elementwise mean over ranks."""
        ...

    def any(self, flag: bool) -> bool:
        """Return True if any rank passes True."""
        ...

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of equal shape, by rank."""
        ...

    def all_gather_with_grad(self, values: Tensor) -> Tensor:
        """Concatenate the rows of all ranks, by rank. The gradient of a row, summed over the ranks' losses, flows back
        to the rank of the row."""
        ...


class SingleProcess:
    """The strategy of a single process."""

    rank, world_size, is_main = 0, 1, True

    def __init__(self) -> None:
        self._scales: dict[Tensor, Tensor | None] = {}

    def main_first(self) -> AbstractContextManager[object]:
        return nullcontext()

    def checkpointer(self, files: LocalCheckpointer) -> Checkpointer:
        return files

    def shard_stream(self, stream: Any) -> None:
        """Do nothing: this process takes the whole batch."""

    def init_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        self._scales = {}
        return trainable.to(device)

    def summary(self) -> str:
        return ""

    def microbatch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def unsharded(self) -> AbstractContextManager[object]:
        return nullcontext()

    def set_grad_scale(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        self._scales |= dict.fromkeys(parameters, scale)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by their scales."""
        unscale_all(self._scales)

    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: there are no error buffers."""

    def assert_replicas_equal(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: there is one copy."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def error_buffers(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor], errors: Iterable[Mapping[str, Tensor]] = ()) -> None:
        """Do nothing: there is no state."""

    def mean(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def all_gather(self, values: Tensor) -> list[Tensor]:
        return [values]

    def all_gather_with_grad(self, values: Tensor) -> Tensor:
        return values


def fold_in(seed: int, rank: int = 0, step: int = 0) -> int:
    """Return the seed of a rank for random numbers drawn from a step on. Rank 0 at step 0 has the seed of a single
    process. All 63 bits of `seed` enter the hash, because a CPU generator reads only the lower 32."""
    return int(splitmix64(seed, rank, step)) >> 1 if rank or step or seed >= 2**32 else seed
