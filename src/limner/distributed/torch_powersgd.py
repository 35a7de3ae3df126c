"""torch's own PowerSGD, made for DistributedDataParallel, as a way to reduce gradients (Vogels et al. 2019).

It is what `powersgd.py` is compared with, for processes that each hold all weights. What it does otherwise:

- all matrices are compressed, embeddings and output layers too, to one rank;
- Q begins as the last step's Q, not as what was drawn at first; factors travel in fp32;
- nothing is compressed in the first two updates;
- it begins when all gradients are there. The hook goes on from one collective to the next in threads of the backend, so
  that with several buckets their order is not the same on all processes.

The hook knows nothing of values that are not finite, and would keep them in its error buffers for good. So a matrix
with such a gradient on one process gets none on any, as in E.2 of Ramesh et al. 2021, and what the hook then hands over
for it goes back into the buffer.

A checkpoint holds Q, the count of updates and, as that of `powersgd.py`, the error buffers.

Shapes: n values of all matrices, k matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from limner.distributed.gradient_reducers import Bucket, Plain, Replicas, Waiting, averaged, unpacked
from limner.errors import UserError
from limner.numerics.formats import HALVES
from limner.optim import grad_access
from limner.optim.dtensor import is_dtensor

_UNCOMPRESSED = 2  # updates; the least that the hook takes
_Q, _UPDATES = "/Q", "/updates"  # in checkpoints, where all else has the name of a parameter


@dataclass(frozen=True)
class _All:
    """As much of DDP's bucket as the hook asks for. There is one, with the gradients of all matrices."""

    values: Float[Tensor, " n"]
    parts: list[Tensor]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self.values

    def gradients(self) -> list[Tensor]:
        return self.parts


class TorchPowerSGD(Plain):
    """See the module; a `GradientReducer`.

    Args:
        rank: of the two factors of each matrix.
    """

    def __init__(self, rank: int = 32) -> None:
        self.rank = rank

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        """Raises `UserError` if weights are in shards, or if no matrix would be smaller as two factors."""
        super().attach(buckets, replicas)
        trained = {n: p for bucket in buckets.values() for n, p in bucket.parameters.items() if p.requires_grad}
        if any(map(is_dtensor, trained.values())):
            raise UserError(
                "torch's PowerSGD is for processes that each hold all weights: leave --parallel out, or choose "
                "--reduce powersgd"
            )
        self._given = sum(p.ndim > 1 for p in trained.values())
        self._matrices = {name: p for name, p in trained.items() if p.ndim > 1 and self._smaller(p)}
        if not self._matrices:
            raise UserError(
                f"none of the model's {self._given} matrices can be compressed to rank {self.rank}: two factors would "
                "be no smaller; choose a lower --reduce.rank, or another --reduce"
            )
        self._state: Any = PowerSGDState(
            replicas.group, self.rank, start_powerSGD_iter=_UNCOMPRESSED, min_compression_rate=1
        )
        like = next(iter(self._matrices.values()))
        count = sum(p.numel() for p in self._matrices.values())
        self._state.error_dict[0] = torch.zeros(count, dtype=torch.float32, device=like.device)

    def _smaller(self, p: Tensor) -> bool:
        """Whether two factors are smaller than the matrix."""
        height, width = len(p), p[0].numel()
        return min(height, width, self.rank) * (height + width) < height * width

    def describe(self) -> str:
        which = f"{len(self._matrices)} of {self._given} matrices"
        return f"gradients of {which} are compressed to rank {self.rank} by torch's PowerSGD, from the third update on"

    def reduce(self, bucket: str) -> Waiting:
        """What is not compressed, in fp32."""
        others = [p for name, p in self.buckets[bucket].parameters.items() if name not in self._matrices]
        return averaged(others, self.mean)

    def finish(self) -> Waiting:
        grads = [p.grad for p in self._matrices.values()]
        values = torch.zeros_like(self._state.error_dict[0])
        finite = torch.stack([values.new_ones(()) if g is None else g.isfinite().all().to(values) for g in grads])
        yield from self.replicas.mean(finite)  # below one: not on all
        bad = [flag < 1 for flag in finite.tolist()]
        parts = list(self._split(values))
        for part, grad, skip in zip(parts, grads, bad, strict=True):
            if grad is not None and not skip:
                part.copy_(grad_access.grad_values(grad))
        self._state.rng.seed(self._state.iter)  # of Q, where it is drawn: so that its state need not be kept
        yield cast(Any, powerSGD_hook(self._state, cast(Any, _All(values, parts))))  # waited for as other work is
        for part, error, grad, skip in zip(parts, self._errors, grads, bad, strict=True):
            if not part.isfinite().all():  # too large to be multiplied
                error.zero_()
                self._state.p_memory_dict.clear()  # so that Q is drawn anew
            elif grad is None or skip:
                error.add_(part)
            elif grad.dtype in HALVES:  # what it cannot have of it
                error.add_(part)
                part.copy_(grad_access.round_to_storage(part, grad.dtype, grad_access.pending_scale(grad)))
                error.sub_(part)
            if grad is not None:
                grad_access.set_grad_values(grad, torch.full_like(part, torch.nan) if skip else part)

    @property
    def _errors(self) -> list[Tensor]:
        """The error buffers, shaped as the matrices."""
        return list(self._split(self._state.error_dict[0]))

    def _split(self, values: Float[Tensor, " n"]) -> Iterator[Tensor]:
        shapes = [p.shape for p in self._matrices.values()]
        for part, shape in zip(values.split([prod(shape) for shape in shapes]), shapes, strict=True):
            yield part.view(shape)

    @torch.no_grad()
    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """What was handed over is in the buffers again, where it is finite."""
        these = set(parameters)
        for p, error in zip(self._matrices.values(), self._errors, strict=True):
            if p in these and p.grad is not None and p.grad.isfinite().all():
                error.add_(grad_access.grad_values(p.grad))

    def tensors(self) -> dict[str, Tensor]:
        updates, q = torch.tensor(self._state.iter, device="cpu"), self._state.q_memory_dict.get(0)
        return {_UPDATES: updates} if q is None else {_UPDATES: updates, _Q: q}

    def errors(self) -> dict[str, Tensor]:
        return dict(zip(self._matrices, self._errors, strict=True))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Q of another rank is left out: it is drawn anew then."""
        for (name, p), error in zip(self._matrices.items(), self._errors, strict=True):
            if (kept := tensors.get(name)) is not None:
                if kept.shape != p.shape:
                    there, here = list(kept.shape), list(p.shape)
                    raise UserError(f"the error buffer of {name!r} has shape {there}, where the model has {here}")
                error.copy_(unpacked(kept))
        if _UPDATES in tensors:
            self._state.iter = int(tensors[_UPDATES])
        ranks = [(min(len(p), p[0].numel(), self.rank), p) for p in self._matrices.values()]
        if _Q in tensors and tensors[_Q].numel() == sum(r * p[0].numel() for r, p in ranks):
            self._state.q_memory_dict[0] = tensors[_Q].to(self._state.error_dict[0].device, copy=True)
            self._state.p_memory_dict[0] = self._state.error_dict[0].new_empty(sum(r * len(p) for r, p in ranks))
