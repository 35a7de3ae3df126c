"""Exponential moving averages of a model's parameters, which evaluate better than the latest parameters.

    ema <- d * ema + (1 - d) * parameters          every `every` updates

The paper uses d = 0.999 for the dVAE (A.2) and, to save time, d = 0.99 once in 25 updates for the prior (B.2). With
`warmup` the coefficient of the n-th averaging is min(d, (1 + n) / (10 + n)), so that the average forgets the
initialization quickly. Parameters are averaged in fp32, or in fp64 if they are fp64. Buffers are not averaged.

`Ema` averages on the model's device. `EmaOnCpu` takes no GPU memory and adds only a copy to a step, as in B.2.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from limner.errors import UserError
from limner.numerics.precision import upcast
from limner.optim.dtensor import shard_like


class Ema:
    """Averaged parameters of one model, by name.

    Args:
        model: its current parameters are the initial average.
        decay: coefficient d, in [0, 1).
        every: updates between two averagings.
        warmup: raise the coefficient from 2/11 to `decay` over the first averagings.
    """

    def __init__(self, model: nn.Module, decay: float, every: int = 1, warmup: bool = True) -> None:
        if not 0 <= decay < 1 or every < 1:
            raise ValueError(f"averaging needs 0 <= decay < 1 and every >= 1, not {decay} and {every}")
        self.decay, self.every, self.warmup = decay, every, warmup
        self._averages = {name: upcast(p.detach()).clone() for name, p in model.named_parameters()}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Averages, in fp32 or fp64."""
        return self._averages

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """Average if `updates`, the number of updates so far (1, 2, ...), is a multiple of `every`."""
        if updates % self.every:
            return
        n = updates // self.every
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        self._average({name: p.detach() for name, p in model.named_parameters()}, decay)

    def _average(self, current: Mapping[str, Tensor], decay: float) -> None:
        for name, average in self._averages.items():
            average.lerp_(upcast(current[name]), 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the model's parameters with the averages."""
        for name, p in model.named_parameters():
            p.copy_(self.parameters[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Put the averages into the model within the context, and restore its parameters afterwards."""
        original = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.copy_to(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(original[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Averages by name, as the model's `load_state_dict` takes them."""
        return dict(self.parameters)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load averages. Raises `UserError` if names or shapes differ from the model's."""
        for name, average in self.parameters.items():
            if name not in state or state[name].shape != average.shape:
                raise UserError(f"the averaged weights lack {name!r} with shape {list(average.shape)}")
            average.copy_(shard_like(state[name], average))


class EmaOnCpu(Ema):
    """Averages in CPU memory. A GPU copies parameters there asynchronously, and a thread averages them during training.

    Reading the averages waits for the thread.
    """

    def __init__(self, model: nn.Module, decay: float, every: int = 1, warmup: bool = True) -> None:
        super().__init__(model, decay, every, warmup)
        on_gpu = any(p.is_cuda for p in model.parameters())
        self._averages = {name: x if x.is_meta else x.cpu() for name, x in self._averages.items()}  # meta in a dry run
        self._latest = {name: torch.empty_like(x, pin_memory=on_gpu) for name, x in self._averages.items()}
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return self._averages

    def _average(self, current: Mapping[str, Tensor], decay: float) -> None:
        copied = None
        for name, average in self.parameters.items():  # waits for the pending average, which reads `_latest`
            self._latest[name].copy_(current[name], non_blocking=average.device != current[name].device)
        if any(x.is_cuda for x in current.values()):
            copied = torch.cuda.Event()
            copied.record()
        self._pending = self._thread.submit(self._average_latest, decay, copied)

    @torch.no_grad()
    def _average_latest(self, decay: float, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        super()._average(self._latest, decay)
