"""PowerSGD: gradients sent between replicas as two thin factors (Vogels et al. 2019; Ramesh et al. 2021, App. E.2).

For each matrix a replica keeps an error buffer E [m, n] with m <= n (transposed if necessary): the sum of its gradients
minus the updates applied so far. Each update is the projection of E onto r directions. In E.2's steps:

    2   E += G, on replicas where G is finite
    3   P = E Q_0                 [m, r]; Q_0 [n, r] is drawn once from a seed, stored in 1-6-9 and stays fixed
    4   P = mean over replicas    one collective for all matrices of a block
    5   P = orthonormal columns of P + eps I, by Householder reflections; eps is in lengths of P's longest column
    6   Q = E^T P                 [n, r]
    7   Q = mean over replicas    one collective for all matrices of a block
    8   other parameters are averaged in fp32: those of all blocks in one collective, those outside blocks per bucket
    9   norm of all gradients     from P, Q and the uncompressed gradients
    10  shards exchange flags     a matrix whose gradient is not finite on a shard becomes NaN on all
    11  the gradient is P Q^T     the same on all replicas; set and applied block by block
    12  E -= P Q^T                if P and Q are finite; a buffer that is not finite is reset to zero

Step 12 directly follows step 7. While a block waits for communication, only its packed buffers hold E + G. A replica
holds the gradients of the block in the backward pass, and P Q^T of the block that is updated.

A replica thus sends r (m + n) numbers instead of m n. Error feedback keeps the sum exact: over all steps, the mean of
the buffers plus the applied gradients is the sum of the mean gradients. Numbers are sent in 1-6-9, half the size of
fp32. Rounding errors stay in the buffers: step 12 subtracts the product of the rounded factors. For a parameter in 16
bits, the error of rounding or clamping the gradient to its format stays there, too.

With shards, each process factors its own shard, with r / shards directions, "independently of its neighboring GPUs"
(§2.5). Since all steps are linear in E, only the mean of the buffers over replicas matters, up to rounding: a run
resumes from the mean with another number of replicas. (The paper divides gradients by the whole batch, so its
checkpoints hold the sum; here gradients are means over a replica's samples.)

If an update is skipped, or leaves out some tensors, `restore_error_feedback` adds P Q^T to their buffers again. The
value that is not finite may be in another block, and E.2 would lose the contribution of earlier steps.

Three details differ from E.2. Flags sent with P and Q tell whether the gradients, P and Q are finite: all replicas
mark the same blocks with NaN, and end their reduction early. If a block is not finite, E.2 still runs step 12 for all
others. And the norm is that of P Q^T: E.2 takes the norm of Q, which equals it only as far as P's columns are
orthonormal after rounding.

Shapes: m x n a matrix's shard with m <= n, r directions of a shard, k matrices of one m in a block.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from limner.distributed.compressed_matrix import Matrix
from limner.distributed.gradient_reducers import Bucket, Fp32Reducer, PendingWork, Replicas, average_grads, unpack_error
from limner.errors import UserError
from limner.numerics.formats import E6M9, HALF_FORMATS
from limner.numerics.seeding import named_seed
from limner.optim.dtensor import from_local, is_dtensor, shard_like, sum_over_shards, to_local
from limner.validation import Range, Validated

__all__ = ["PowerSGD", "PowerSGDConfig", "orthonormal"]

EPS = 1e-6  # step 5


def orthonormal(p: Float[Tensor, "k m r"], eps: float = EPS) -> Float[Tensor, "k m r"]:
    """Return orthonormal columns with the span of `p` + eps I: [k, m, r] -> [k, m, r], r <= m. Householder reflections
    stay orthonormal where Gram-Schmidt loses precision. `eps` is in lengths of the longest column, so that the
    result does not depend on the scale of the gradient."""
    p = p / p.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    longest = p.norm(dim=-2).amax(-1, keepdim=True).clamp_min(1)
    p.diagonal(dim1=-2, dim2=-1).add_(eps * longest)
    return torch.linalg.householder_product(*torch.geqrf(p))


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig(Validated):
    """Settings of PowerSGD.

    Attributes:
        rank: directions of a matrix, divided evenly among its shards; each shard has at most as many as its smaller
            side. None takes an eighth of the matrix's smaller side.
        quantize: send factors and keep buffers in 1-6-9 instead of fp32.
        seed: seed of Q_0.
    """

    rank: Annotated[int | None, Range(1, 2**16)] = None
    quantize: bool = True
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0


class PowerSGD(Fp32Reducer):
    """A reducer with the steps of the module docstring."""

    def __init__(self, config: PowerSGDConfig | None = None) -> None:
        self.config = config or PowerSGDConfig()
        self.blocks: dict[str, list[Matrix]] = {}  # compressed matrices by block
        self._uncompressed: list[nn.Parameter] = []  # of blocks
        self._total = 0  # number of matrices of blocks
        self.factors: dict[nn.Parameter, tuple[Matrix, Tensor, Tensor]] = {}  # P and Q of gradients to decompress

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        super().attach(buckets, replicas)
        for name, bucket in buckets.items():
            if bucket.in_block:
                trained = {key: p for key, p in bucket.parameters.items() if p.requires_grad}
                matrices = {key: self.make_matrix(key, p) for key, p in trained.items()}
                self.blocks[name] = [matrix for matrix in matrices.values() if matrix is not None]
                self._uncompressed += [p for key, p in bucket.parameters.items() if matrices.get(key) is None]
                self._total += sum(p.ndim > 1 for p in trained.values())
        if self._total and not self.matrices():
            rank = "" if self.config.rank is None else f" of rank {self.config.rank}"
            raise UserError(
                f"two factors{rank} would not be smaller than any of the {self._total} matrices of the model's "
                "blocks: choose a lower --grad-compression.rank, or another --grad-compression"
            )

    def summary(self) -> str:
        if not self._total:
            return "the model lacks blocks, so its gradients are sent in fp32"
        ranks = {m.q0.shape[1] * _shards(m.parameter) for m in self.matrices()}
        rank = " to ".join(str(r) for r in sorted({min(ranks), max(ranks)}))
        split = f" over {shards} shards" if (shards := _shards(self.matrices()[0].parameter)) > 1 else ""
        return f"gradients of {len(self.matrices())} of {self._total} matrices are compressed to rank {rank}{split}"

    def make_matrix(self, name: str, p: nn.Parameter) -> Matrix | None:
        """Return None if two factors would not be smaller than the matrix, or if its shards differ in size."""
        shards, shard = _shards(p), to_local(p.detach())
        if p.ndim < 2 or shard.numel() * shards != p.numel():
            return None
        height, width = len(shard), shard[0].numel()
        m, n = sorted((height, width))
        r = max(1, min((self.config.rank or min(len(p), p[0].numel()) // 8) // shards, m))
        if r * (m + n) >= m * n:
            return None
        generator = torch.Generator().manual_seed(named_seed(self.config.seed, name))  # the same on all replicas
        q0 = torch.randn(n, r, generator=generator).to(shard.device)
        buffer = torch.zeros(shard.shape, dtype=torch.float32, device=shard.device)
        if self.config.quantize:
            buffer, q0 = E6M9.pack(buffer), E6M9.pack(q0)
        return Matrix(name, p, buffer, q0, height > width)

    def reduce(self, bucket: str) -> PendingWork:
        """Run steps 2 to 7 and 12 for a block, step 8 for a bucket outside the blocks."""
        if not self.buckets[bucket].in_block:
            yield from super().reduce(bucket)
            return
        matrices = [matrix for matrix in self.blocks[bucket] if matrix.parameter.grad is not None]
        if not matrices:
            return
        finite = torch.stack([matrix.accumulate_grad() for matrix in matrices]).all()
        # With "predetermined constants" (step 3) P rarely and Q never overflows 1-6-9; step 5 cancels those of P.
        p = [m.oriented_error() @ unpack_error(m.q0) * _inverse_root(len(m.q0)) for m in matrices]
        if (yield from self._average_factors(p, finite & _finite(p))):
            p = self._orthonormal(p)
            orthonormal_finite = _finite(p)  # 1-6-9 has only finite codes: NaN would become the largest
            if self.config.quantize:
                p = [E6M9.round(x) for x in p]
            q = [m.oriented_error().T @ x * _inverse_root(len(x)) for m, x in zip(matrices, p, strict=True)]
            all_finite = yield from self._average_factors(q, orthonormal_finite & _finite(q))
            q = [y / _inverse_root(len(x)) for x, y in zip(p, q, strict=True)]
            if all_finite:
                for matrix, left, right in zip(matrices, p, q, strict=True):
                    self.subtract_update(matrix, left, right)
                return
        for matrix in matrices:
            if not (error := matrix.error()).isfinite().all():
                matrix.store_error(torch.zeros_like(error))
            matrix.set_nonfinite_grad()

    def _average_factors(self, factors: list[Tensor], flag: Tensor) -> Generator[distributed.Work, None, bool]:
        """Replace each factor by its mean over replicas, in one collective. Return True if the flag is true on all
        replicas."""
        flat = torch.cat([*(x.flatten() for x in factors), (~flag).float().view(1)])
        yield from self.replicas.compressed_mean(flat, E6M9) if self.config.quantize else self.replicas.mean(flat)
        *values, failures = flat.split([*(x.numel() for x in factors), 1])
        factors[:] = [x.view_as(before) for x, before in zip(values, factors, strict=True)]
        return failures.item() == 0

    def finish(self) -> PendingWork:
        """Run step 8 for the uncompressed parameters of all blocks, and step 10."""
        yield from average_grads(self._uncompressed, self.replicas.mean)
        matrices = [m for m in self.matrices() if m.parameter in self.factors or m.parameter.grad is not None]
        if matrices and is_dtensor(matrices[0].parameter):
            flags = [torch.tensor(m.parameter not in self.factors, device=m.q0.device).float() for m in matrices]
            failures = sum_over_shards(flags, [m.parameter for m in matrices]).tolist()
            for matrix, failed in zip(matrices, failures, strict=True):
                if failed and matrix.parameter in self.factors:
                    self.restore_error_feedback([matrix.parameter])
                    matrix.set_nonfinite_grad()

    @torch.no_grad()
    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Run step 9. The squared norm of P Q^T is the sum of the products of entries of P^T P and Q^T Q."""
        parameters = list(parameters)
        norm, compressed = super().grad_norm(parameters), [p for p in parameters if p in self.factors]
        if not compressed:
            return norm
        squares = [((p.mT @ p) * (q.mT @ q)).sum() for _, p, q in (self.factors[p] for p in compressed)]
        return torch.hypot(norm, sum_over_shards(squares, list(compressed)).sum().clamp_min(0).sqrt())

    @torch.no_grad()
    def parts(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters with uncompressed gradients, then run step 11 block by block."""
        yield from super().parts(parameters)
        for block in self.blocks.values():
            if part := [matrix.parameter for matrix in block if matrix.parameter in self.factors]:
                for parameter in part:
                    matrix, p, q = self.factors.pop(parameter)
                    matrix.set_grad(matrix.rounded_product(p, q))
                yield part

    @torch.no_grad()
    def restore_error_feedback(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add P Q^T to the buffer again, and discard it. Without P and Q, step 12 has not subtracted it."""
        for parameter in parameters:
            if factors := self.factors.pop(parameter, None):
                matrix, p, q = factors
                matrix.store_error(matrix.error() + matrix.rounded_product(p, q))

    def orthonormal(self, p: Float[Tensor, "k m r"]) -> Float[Tensor, "k m r"]:
        """Run step 5 for matrices of one shape."""
        return orthonormal(p)

    def subtract_update(self, matrix: Matrix, p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]) -> None:
        """Run step 12, and keep P and Q for step 11."""
        error = matrix.error()
        if matrix.parameter.dtype in HALF_FORMATS:
            error.sub_(matrix.rounded_product(p, q))
        else:
            error.addmm_(*matrix.product(p, q), alpha=-1)
        matrix.store_error(error)
        self.factors[matrix.parameter] = matrix, p, q

    def _orthonormal(self, factors: list[Float[Tensor, "m r"]]) -> list[Float[Tensor, "m r"]]:
        """Run step 5 for all factors, batched by shape."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in factors:
            by_shape.setdefault(p.shape, []).append(p)
        results = {shape: iter(self.orthonormal(torch.stack(group))) for shape, group in by_shape.items()}
        return [next(results[p.shape]) for p in factors]

    def matrices(self) -> list[Matrix]:
        """Return the compressed matrices of all blocks."""
        return [matrix for block in self.blocks.values() for matrix in block]

    def error_buffers(self) -> dict[str, Tensor]:
        return {matrix.name: from_local(matrix.buffer, matrix.parameter) for matrix in self.matrices()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for matrix in self.matrices():
            if (error := tensors.get(matrix.name)) is not None:
                if error.shape != matrix.parameter.shape:
                    raise UserError(
                        f"the error buffer of {matrix.name!r} has shape {list(error.shape)}, but "
                        f"{list(matrix.parameter.shape)} in the model"
                    )
                matrix.store_error(unpack_error(shard_like(error.to(matrix.buffer.device), matrix.parameter)))


def _inverse_root(n: int) -> float:
    """Return about 1 / sqrt(n) as a power of two, so that scaling is exact."""
    return 2.0 ** -ceil(log2(n) / 2)


def _shards(p: Tensor) -> int:
    """Return the number of shards of a parameter."""
    return p.device_mesh.size() if is_dtensor(p) else 1


def _finite(tensors: list[Tensor]) -> Tensor:
    """Return True, as a tensor [], if all values are finite. A sum is not finite if one of its terms is not."""
    return torch.stack([x.sum() for x in tensors]).isfinite().all()
