"""torch's PowerSGD hook for DistributedDataParallel, as a gradient reducer (Vogels et al. 2019).

It is the baseline for `powersgd.py`, for processes that each hold all weights. Differences:

- All matrices, including embeddings and output layers, are compressed to one rank.
- Q starts from the last step's Q instead of a fixed random Q; factors are sent in fp32.
- Nothing is compressed in the first two updates.
- It starts when all gradients are complete, in a single bucket. The hook chains collectives in threads of the backend,
  so with several buckets their order would differ between processes.

The hook does not check for values that are not finite, which would stay in its error buffers. Therefore a matrix with
such a gradient on one process enters as zero on all, and the hook's result for it is added to the buffer. (In E.2 of
Ramesh et al. 2021 only that process leaves its gradient out.)

A checkpoint holds Q, the count of updates and, as for `powersgd.py`, the error buffers.

Shapes: n values of all matrices, k matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from limner.distributed.gradient_reducers import Bucket, Fp32Reducer, PendingWork, Replicas, average_grads, unpack_error
from limner.errors import UserError
from limner.numerics.formats import HALF_FORMATS
from limner.optim import grad_access
from limner.optim.dtensor import is_dtensor

UNCOMPRESSED_UPDATES = 2  # the minimum that the hook accepts
Q_KEY, UPDATES_KEY = "/Q", "/updates"  # keys in checkpoints; the other keys are names of parameters


class TorchPowerSGD(Fp32Reducer):
    """Torch's PowerSGD hook, which sends two factors of rank `rank` for each matrix."""

    def __init__(self, rank: int = 32) -> None:
        self.rank = rank

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        """Raises `UserError` if weights are sharded, or if factors shrink no matrix."""
        super().attach(buckets, replicas)
        trained = {n: p for bucket in buckets.values() for n, p in bucket.parameters.items() if p.requires_grad}
        if any(map(is_dtensor, trained.values())):
            raise UserError(
                "torch's PowerSGD requires that each process holds all weights: omit --parallel, or choose "
                "--grad-compression powersgd"
            )
        self._num_matrices = sum(p.ndim > 1 for p in trained.values())
        self._matrices = {
            name: p for name, p in trained.items() if p.ndim > 1 and self._rank(p) * (len(p) + p[0].numel()) < p.numel()
        }
        if not self._matrices:
            raise UserError(
                f"two factors of rank {self.rank} would not be smaller than any of the model's {self._num_matrices} "
                "matrices: choose a lower --grad-compression.rank, or another --grad-compression"
            )
        self._state: Any = PowerSGDState(
            replicas.group, self.rank, start_powerSGD_iter=UNCOMPRESSED_UPDATES, min_compression_rate=1
        )
        count, device = sum(p.numel() for p in self._matrices.values()), next(iter(trained.values())).device
        self._state.error_dict[0] = torch.zeros(count, dtype=torch.float32, device=device)

    def _rank(self, p: Tensor) -> int:
        return min(len(p), p[0].numel(), self.rank)

    def summary(self) -> str:
        count = f"{len(self._matrices)} of {self._num_matrices}"
        return f"gradients of {count} matrices are compressed to rank {self.rank} by torch's PowerSGD from update 3 on"

    def reduce(self, bucket: str) -> PendingWork:
        """Average the uncompressed gradients of a bucket in fp32."""
        uncompressed = [p for name, p in self.buckets[bucket].parameters.items() if name not in self._matrices]
        return average_grads(uncompressed, self.mean)

    def finish(self) -> PendingWork:
        grads = [p.grad for p in self._matrices.values()]
        values = torch.zeros_like(self._state.error_dict[0])
        finite = torch.stack([values.new_ones(()) if g is None else g.isfinite().all().to(values) for g in grads])
        yield from self.replicas.mean(finite)  # the mean is below 1 if any process has 0
        skips = [flag < 1 for flag in finite.tolist()]
        parts = list(self._split(values))
        for part, grad, skip in zip(parts, grads, skips, strict=True):
            if grad is not None and not skip:
                part.copy_(grad_access.grad_values(grad))
        self._state.rng.seed(self._state.iter)  # for draws of Q, without saving a generator
        # Methods of DDP's `GradBucket` that the hook uses; one bucket holds all matrices.
        methods = {"index": 0, "is_last": True, "buffer": values, "gradients": parts}
        bucket: Any = SimpleNamespace(**{name: lambda value=value: value for name, value in methods.items()})
        yield cast(Any, powerSGD_hook(self._state, bucket))  # a future, awaited like `Work`
        for part, error, grad, skip in zip(parts, self._errors, grads, skips, strict=True):
            if not part.isfinite().all():  # products have overflowed
                error.zero_()
                self._state.p_memory_dict.clear()  # makes the hook draw a new Q
            elif grad is None or skip:
                error.add_(part)
            elif grad.dtype in HALF_FORMATS:  # the buffer keeps the rounding error
                error.add_(part)
                part.copy_(grad_access.round_to_storage(part, grad.dtype, grad_access.pending_scale(grad)))
                error.sub_(part)
            if grad is not None:
                grad_access.set_grad_values(grad, torch.full_like(part, torch.nan) if skip else part)

    @property
    def _errors(self) -> list[Tensor]:
        """Views of the error buffers, shaped as the matrices."""
        return list(self._split(self._state.error_dict[0]))

    def _split(self, values: Float[Tensor, " n"]) -> Iterator[Tensor]:
        shapes = [p.shape for p in self._matrices.values()]
        for part, shape in zip(values.split([prod(shape) for shape in shapes]), shapes, strict=True):
            yield part.view(shape)

    @torch.no_grad()
    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add finite reduced gradients to the buffers again."""
        restored = set(parameters)
        for p, error in zip(self._matrices.values(), self._errors, strict=True):
            if p in restored and p.grad is not None and p.grad.isfinite().all():
                error.add_(grad_access.grad_values(p.grad))

    def state_dict(self) -> dict[str, Tensor]:
        updates, q = torch.tensor(self._state.iter, device="cpu"), self._state.q_memory_dict.get(0)
        return {UPDATES_KEY: updates} if q is None else {UPDATES_KEY: updates, Q_KEY: q}

    def error_buffers(self) -> dict[str, Tensor]:
        return dict(zip(self._matrices, self._errors, strict=True))

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state, except a Q of another rank; the hook then draws a new one."""
        for (name, p), error in zip(self._matrices.items(), self._errors, strict=True):
            if (saved := tensors.get(name)) is not None:
                if saved.shape != p.shape:
                    shape, expected = list(saved.shape), list(p.shape)
                    raise UserError(f"the error buffer of {name!r} has shape {shape}, but {expected} in the model")
                error.copy_(unpack_error(saved))
        if UPDATES_KEY in tensors:
            self._state.iter = int(tensors[UPDATES_KEY])
        matrices = self._matrices.values()
        if Q_KEY in tensors and tensors[Q_KEY].numel() == sum(self._rank(p) * p[0].numel() for p in matrices):
            self._state.q_memory_dict[0] = tensors[Q_KEY].to(self._state.error_dict[0].device, copy=True)
            self._state.p_memory_dict[0] = self._state.error_dict[0].new_empty(
                sum(self._rank(p) * len(p) for p in matrices)
            )
