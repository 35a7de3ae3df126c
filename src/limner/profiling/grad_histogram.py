"""Which powers of two the gradients of a model have, and how many a number format would lose (App. D of Ramesh et al.).

Underflow is silent: a gradient below a format's smallest number becomes zero, and a loss curve that is slightly worse
is all that shows. So the exponents of all gradients are counted, for each resblock those that enter it (of activations)
and those of its parameters, and for what is no resblock those of its parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from limner.training.grad_scaler import resblocks
from limner.training.train_module import Batch
from limner.training.train_state import Run

LOWEST, HIGHEST = -149, 127  # exponents of fp32, subnormal numbers included
SMALLEST = {"fp16": 2.0**-24, "bf16": 2.0**-133, "1-6-9": 2.0**-68, "e5m2": 2.0**-16, "e4m3": 2.0**-9}


@dataclass(frozen=True)
class Exponents:
    """How many numbers have each exponent, floor(log2|x|).

    Attributes:
        counts: of `LOWEST` ... `HIGHEST`.
        zeros, nonfinite: numbers that have none.
    """

    counts: Int64[Tensor, " 277"]
    zeros: int
    nonfinite: int

    @staticmethod
    def of(values: Float[Tensor, "..."]) -> Exponents:
        values = values.detach().float().flatten()
        finite = values[values.isfinite()]
        numbers = finite[finite != 0]
        found = torch.frexp(numbers).exponent.long() - 1  # frexp's significands begin at 1/2
        counts = torch.bincount(found - LOWEST, minlength=HIGHEST - LOWEST + 1)
        return Exponents(counts.cpu(), len(finite) - len(numbers), len(values) - len(finite))

    def flushed(self, smallest: float, scale: float = 1.0) -> float:
        """The share of numbers that are not zero, and would be in a format with this smallest number above zero (a
        power of two) if they were multiplied by `scale` first. More than half of the smallest is rounded up; a number
        that is half of it counts as kept."""
        total = int(self.counts.sum())
        first = math.ceil(math.log2(smallest / scale)) - 1 - LOWEST
        return int(self.counts[: max(first, 0)].sum()) / total if total else 0.0

    def shares(self) -> list[tuple[float, float]]:
        """(exponent, share of the numbers that are not zero), from the lowest to the highest that there is."""
        there = self.counts.nonzero().flatten().tolist()
        if not there:
            return []
        found = self.counts / self.counts.sum()
        return [(i + LOWEST, found[i].item()) for i in range(there[0], there[-1] + 1)]

    def range(self, share: float = 0.98) -> tuple[int, int]:
        """The exponents between which the middle `share` of the numbers lies; (0, 0) if there are none."""
        total = int(self.counts.sum())
        if not total:
            return 0, 0
        below = self.counts.cumsum(0) / total
        tail = (1 - share) / 2
        return int((below <= tail).sum()) + LOWEST, int((below < 1 - tail).sum()) + LOWEST


@dataclass(frozen=True)
class Part:
    """The gradients of a part of a model, by `name`. `activations` are those that enter a resblock."""

    name: str
    activations: Exponents | None
    parameters: Exponents

    def shares(self) -> dict[str, list[tuple[float, float]]]:
        """The share of each exponent, of activations, if there are any, and of parameters."""
        found = {"activations": self.activations, "parameters": self.parameters}
        return {what: of.shares() for what, of in found.items() if of is not None}


def exponents(run: Run, batch: Batch) -> list[Part]:
    """Those of one batch, in the model's order, computed in fp32 whatever the run computes in: what its format has lost
    could not be counted. The run's gradients are gone afterwards, nothing else is changed."""
    model = run.model
    blocks: dict[str, nn.Module] = dict(resblocks(model))
    entering: dict[str, list[Tensor]] = {name: [] for name in blocks}
    handles = []
    for name, block in blocks.items():

        def keep(_: nn.Module, args: object, out: Tensor, name: str = name) -> None:
            out.register_hook(lambda grad: entering[name].append(grad.detach().float().flatten()))

        handles.append(block.branch.register_forward_hook(keep))  # type: ignore[union-attr]
    try:
        loss, _ = run.trainable(batch, run.step, run.generator)
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    inside = {id(p): name for name, block in blocks.items() for p in block.parameters()}
    grads: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grads.setdefault(inside.get(id(p), name.rpartition(".")[0] or name), []).append(p.grad.flatten())
            p.grad = None
    return [
        Part(
            name,
            Exponents.of(torch.cat(entering[name])) if entering.get(name) else None,
            Exponents.of(torch.cat(those)),
        )
        for name, those in grads.items()
    ]
