"""Histograms of gradient exponents, and the share that a number format flushes to zero (App. D of Ramesh et al. 2021).

Underflow is silent: a gradient below a format's smallest number becomes zero, and the only symptom is a slightly worse
loss. The exponents of all gradients are counted, for each resblock those of the activations that enter its backward
pass and of its parameters, for other modules those of their parameters.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from limner.blocks import resblocks
from limner.training.train_module import Batch
from limner.training.train_state import TrainState

MIN_EXPONENT, MAX_EXPONENT = -149, 127  # fp32 with subnormal numbers
SMALLEST_SUBNORMAL = {"fp16": 2.0**-24, "bf16": 2.0**-133, "1-6-9": 2.0**-68, "e5m2": 2.0**-16, "e4m3": 2.0**-9}


@dataclass(frozen=True)
class ExponentHistogram:
    """Counts of values by exponent, floor(log2|x|).

    Attributes:
        counts: for `MIN_EXPONENT` ... `MAX_EXPONENT`.
        zeros, nonfinite: counts of values without an exponent.
    """

    counts: Int64[Tensor, " 277"]
    zeros: int
    nonfinite: int

    @staticmethod
    def from_values(values: Float[Tensor, "..."]) -> ExponentHistogram:
        values = values.detach().float().flatten()
        finite = values[values.isfinite()]
        nonzero = finite[finite != 0]
        exponents = torch.frexp(nonzero).exponent.long() - 1  # frexp's significands begin at 1/2
        counts = torch.bincount(exponents - MIN_EXPONENT, minlength=MAX_EXPONENT - MIN_EXPONENT + 1)
        return ExponentHistogram(counts.cpu(), len(finite) - len(nonzero), len(values) - len(finite))

    def underflow(self, smallest: float, scale: float = 1.0) -> float:
        """Return the share of nonzero values that become zero in a format after multiplication by `scale`. `smallest`
        is its smallest positive number, a power of two. Values above half of it round up; half of it counts as kept."""
        total = int(self.counts.sum())
        first = math.ceil(math.log2(smallest / scale)) - 1 - MIN_EXPONENT
        return int(self.counts[: max(first, 0)].sum()) / total if total else 0.0

    def shares(self) -> list[tuple[float, float]]:
        """Return (exponent, share of the nonzero values) from the lowest to the highest exponent with a value."""
        present = self.counts.nonzero().flatten().tolist()
        if not present:
            return []
        shares = self.counts / self.counts.sum()
        return [(i + MIN_EXPONENT, shares[i].item()) for i in range(present[0], present[-1] + 1)]

    def central_range(self, share: float = 0.98) -> tuple[int, int]:
        """Return the exponent range of the central `share` of the values; (0, 0) without nonzero values."""
        total = int(self.counts.sum())
        if not total:
            return 0, 0
        below = self.counts.cumsum(0) / total
        tail = (1 - share) / 2
        return int((below <= tail).sum()) + MIN_EXPONENT, int((below < 1 - tail).sum()) + MIN_EXPONENT


def gradient_exponents(run: TrainState, batch: Batch) -> dict[str, dict[str, ExponentHistogram]]:
    """Return the exponents of one batch's gradients by module, in the model's order: "activations" that enter the
    backward pass of a resblock, and "parameters".

    They are computed in fp32 in any precision of the run, whose format could flush them. The run's gradients are
    cleared, the rest of its state stays.
    """
    blocks = resblocks(run.model)
    entering: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name, block in blocks.items():

            def record(_: nn.Module, args: object, out: Tensor, name: str = name) -> None:
                out.register_hook(lambda grad: entering.setdefault(name, []).append(grad.detach().float().flatten()))

            handle = block.branch.register_forward_hook(record)  # type: ignore[union-attr]
            hooks.callback(handle.remove)
        loss, _ = run.trainable(batch, run.step, run.generator)
        loss.backward()
    block_of = {p: name for name, block in blocks.items() for p in block.parameters()}
    gradients: dict[str, dict[str, list[Tensor]]] = {}
    for name, p in run.model.named_parameters():
        if p.grad is not None:
            module = block_of.get(p, name.rpartition(".")[0] or name)
            kinds = {"activations": entering[module]} if module in entering else {}
            gradients.setdefault(module, kinds).setdefault("parameters", []).append(p.grad.flatten())
            p.grad = None
    return {
        module: {kind: ExponentHistogram.from_values(torch.cat(values)) for kind, values in kinds.items()}
        for module, kinds in gradients.items()
    }
