"""Exponentially weighted iterate averaging: a slow copy of the parameters that evaluates better
than the last iterate.

    ema <- d * ema + (1 - d) * parameters          every `every` updates

The paper uses d = 0.999 for the dVAE (A.2) and, to save time, d = 0.99 once in 25 updates for the
prior (B.2). Early on the copy is mostly initialisation; with `warmup` the coefficient is min(d, (1
+ n) / (10 + n)) at the n-th averaging, which forgets it quickly. Only parameters are averaged
(buffers stay the model's own), in fp32.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from limner.errors import UserError


class Ema:
    """The averaged parameters of one model, by name.

    Args:
        model: its current parameters are the initial average.
        decay: coefficient d, in [0, 1).
        every: updates between two averagings.
        warmup: raise the coefficient from 0.1 to `decay` over the first averagings.
    """

    def __init__(self, model: nn.Module, decay: float, every: int = 1, warmup: bool = True) -> None:
        if not 0 <= decay < 1 or every < 1:
            raise ValueError(f"averaging needs 0 <= decay < 1 and every >= 1, not {decay} and {every}")
        self.decay, self.every, self.warmup = decay, every, warmup
        self.parameters = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """Call after update number `updates` = 1, 2, ...; averages at the multiples of `every`."""
        if updates % self.every:
            return
        n = updates // self.every
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        current = dict(model.named_parameters())
        for name, average in self.parameters.items():
            average.lerp_(current[name].detach().float(), 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the model's parameters with the averaged ones."""
        for name, p in model.named_parameters():
            p.copy_(self.parameters[name])

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Within the context the model holds the averaged parameters; then its own again."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.copy_to(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(own[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged parameters, by name: loads into the model as they are."""
        return dict(self.parameters)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises `UserError` where names or shapes are not the model's."""
        for name, average in self.parameters.items():
            if name not in state or state[name].shape != average.shape:
                raise UserError(f"the averaged weights lack {name!r} or have it in another shape")
            average.copy_(state[name])
