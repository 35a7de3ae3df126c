"""PowerSGD: gradients sent between replicas as two thin factors (Vogels et al. 2019; Ramesh et al. 2021, App. E.2).

For each matrix a replica keeps an error buffer E [m, n], m <= n (transposed, if need be): all that its gradients have
said and that no update has had yet. An update takes the part of it that lies in r directions. In E.2's steps:

    2   E += G, unless G is not finite on one replica: then nothing is added on any
    3   P = E Q_0                 [m, r]; Q_0 [n, r] stays what it was drawn as from a seed
    4   P = mean over replicas    one collective for all matrices of a block
    5   P = orthonormal columns of P + eps I, by Householder's reflections; eps is in lengths of P's longest column
    6   Q = E^T P                 [n, r]
    7   Q = mean over replicas    one collective for all matrices of a block
    8   what is no matrix of a block is averaged in fp32: of all blocks in one collective, what is outside as it comes
    11  the gradient is P Q^T     all replicas have the same
    12  E -= P Q^T                where P and Q are finite; a buffer that is not finite begins anew

Step 12 comes right after step 7, so that a buffer is unpacked and packed once per update.

So r (m + n) numbers travel where m n did, and what is left out comes later: over all steps, the mean of the buffers
plus the gradients handed over is the sum of the mean gradients. Numbers travel in 1-6-9, twice as thin again; what that
rounds off stays in the buffers, too, because step 12 subtracts what the replicas really had. So does what is rounded
off, or cut off, where a parameter in 16 bits takes the gradient in its format.

With shards, each process factors its own shard, with r / shards directions, "independently of its neighboring GPUs"
(§2.5). Since all steps are linear in E, only the mean of the buffers over replicas matters, but for rounding. A
checkpoint holds the buffers of each replica, from which as many go on bit for bit, or, where there are too many for
that (`gradient_reducers.py`), their mean. Any other number goes on from the mean. (The paper's gradients are divided by
the whole batch, so that its checkpoints hold the sum; ours are the mean over a replica's samples.)

Where an update is skipped, or some tensors are left out of it, P Q^T goes back into their buffers (`put_back`): the
value that is not finite need not be in their block, and E.2 has lost then what came from earlier steps.

Two things differ from E.2. With P and with Q travels whether they and the gradients are finite, so that all replicas
leave out the same blocks; with Q also whether P still is after step 5. And the loop measures the gradient's length on
P Q^T itself: the length of Q is the same (in step 9) only as far as P's columns are orthonormal after rounding.

Shapes: m x n a matrix's shard with m <= n, r directions of a shard, k matrices of one m in a block.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Annotated, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from limner.data.stream import hash64
from limner.distributed.gradient_reducers import Bucket, Replicas, Waiting, averaged, unpacked
from limner.errors import UserError
from limner.numerics.formats import E6M9, HALVES
from limner.optim import grad_access
from limner.optim.dtensor import from_local, is_dtensor, shard_like, to_local
from limner.validation import Checked, Range

EPS = 1e-6  # step 5


def orthonormal(p: Float[Tensor, "k m r"], eps: float = EPS) -> Float[Tensor, "k m r"]:
    """Orthonormal columns that span those of `p` + eps I, by Householder's reflections, which stay exact where
    Gram-Schmidt's columns do not: [k, m, r] -> [k, m, r], r <= m. `eps` is in lengths of the longest column, so that
    small gradients get the directions of large ones."""
    p = p / p.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    longest = p.norm(dim=-2).amax(-1, keepdim=True).clamp_min(1)
    p.diagonal(dim1=-2, dim2=-1).add_(eps * longest)
    return torch.linalg.householder_product(*torch.geqrf(p))


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig(Checked):
    """Settings.

    Attributes:
        rank: directions of a matrix, over all its shards, at most as many as the smaller side of a shard has in each;
            None takes an eighth of the matrix's smaller side.
        narrow: whether factors travel and buffers are kept in 1-6-9, else in fp32.
        seed: of Q_0.
    """

    rank: Annotated[int | None, Range(1, 2**16)] = None
    narrow: bool = True
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0


@dataclass
class Matrix:
    """A matrix of a block, or the shard of it that this process has."""

    name: str
    parameter: nn.Parameter
    buffer: Tensor  # E in the shape of the shard, in fp32 or as codes
    turned: bool  # whether the shard is higher than wide
    start: Float[Tensor, "n r"]  # Q_0
    divisor: Tensor | None = None  # of the gradient, if that is in 16 bits (`optim/grad_access.py`)

    def taken(self) -> Float[Tensor, "h w"]:
        """The gradient, as the shard is stored, in fp32; the parameter has none any more."""
        grad = cast(Tensor, self.parameter.grad)
        self.divisor, self.parameter.grad = grad_access.pending_scale(grad), None
        return grad_access.grad_values(grad).flatten(1)

    def give(self, gradient: Float[Tensor, "h w"]) -> None:
        """Let the parameter have that gradient."""
        weight, by = to_local(self.parameter.detach()), self.divisor
        if by is not None:
            gradient = gradient * by
        # In the parameter's own layout: fused optimisers go through memory without regard to strides.
        if (weight.stride(), weight.dtype) != (gradient.stride(), gradient.dtype):
            gradient = torch.empty_like(weight).copy_(gradient.view(weight.shape))
        self.parameter.grad = from_local(gradient, self.parameter)
        if by is not None:
            grad_access.unscale(self.parameter.grad, by)

    def error(self) -> Float[Tensor, "h w"]:
        """E, as the shard is stored, in fp32."""
        return (self.buffer if self.buffer.is_floating_point() else E6M9.unpack(self.buffer)).flatten(1)

    def keep(self, error: Float[Tensor, "h w"]) -> None:
        error = error.view(self.buffer.shape)
        if self.buffer.is_floating_point():
            self.buffer.copy_(error)
        else:
            E6M9.pack(error, out=self.buffer)

    def oriented(self, error: Float[Tensor, "h w"]) -> Float[Tensor, "m n"]:
        return error.T if self.turned else error

    def rounded(self, gradient: Float[Tensor, "h w"]) -> Float[Tensor, "h w"]:
        """What comes of it in the parameter's format."""
        return grad_access.round_to_storage(gradient, self.parameter.dtype, self.divisor)

    def product(self, p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]) -> tuple[Tensor, Tensor]:
        """[h, r] and [r, w], whose product is P Q^T as the shard is stored."""
        return (q, p.T) if self.turned else (p, q.T)


class PowerSGD:
    """See the module; a `GradientReducer`."""

    def __init__(self, config: PowerSGDConfig | None = None) -> None:
        self.config = config or PowerSGDConfig()
        self._matrices: dict[str, list[Matrix]] = {}  # by block
        self._outside: dict[str, list[nn.Parameter]] = {}
        self._rest: list[nn.Parameter] = []  # of blocks
        self._given = 0  # matrices of blocks
        self.factors: list[tuple[Matrix, Tensor, Tensor]] = []  # P and Q of what has gradients

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        self._replicas = replicas
        for name, bucket in buckets.items():
            if not bucket.repeated:
                self._outside[name] = list(bucket.parameters.values())
                continue
            found = {one: self._matrix(one, p) for one, p in bucket.parameters.items() if p.requires_grad}
            self._matrices[name] = [matrix for matrix in found.values() if matrix is not None]
            self._rest += [p for one, p in bucket.parameters.items() if found.get(one) is None]
            self._given += sum(p.ndim > 1 for p in bucket.parameters.values() if p.requires_grad)
        if self._given and not self._all():
            what = "" if self.config.rank is None else f" to rank {self.config.rank}"
            raise UserError(
                f"none of the {self._given} matrices of the model's blocks can be compressed{what}: two factors would "
                "be no smaller; choose a lower --reduce.rank, or another --reduce"
            )

    def describe(self) -> str:
        if not self._given:
            return "the model has no blocks whose gradients could be compressed: they travel in fp32"
        ranks = {m.start.shape[1] * _shards(m.parameter) for m in self._all()}
        rank = " to ".join(str(r) for r in sorted({min(ranks), max(ranks)}))
        shards = _shards(self._all()[0].parameter)
        over = f" over {shards} shards" if shards > 1 else ""
        return f"gradients of {len(self._all())} of {self._given} matrices are compressed to rank {rank}{over}"

    def _matrix(self, name: str, p: nn.Parameter) -> Matrix | None:
        """None where two factors would be no smaller than the matrix, or where shards differ in size."""
        shards, along = _shards(p), cast(Any, p).placements[0].dim if is_dtensor(p) else 0
        if p.ndim < 2 or p.shape[along] % shards:
            return None
        shard = to_local(p.detach())
        height, width = len(shard), shard[0].numel()
        m, n = sorted((height, width))
        r = max(1, min((self.config.rank or min(len(p), p[0].numel()) // 8) // shards, m))
        if r * (m + n) >= m * n:
            return None
        seed = int(hash64(self.config.seed, *name.encode())) >> 1  # the same on all replicas, another one for each name
        start = torch.randn(n, r, generator=torch.Generator().manual_seed(seed)).to(shard.device)
        buffer = torch.zeros(shard.shape, dtype=torch.float32, device=shard.device)
        return Matrix(name, p, E6M9.pack(buffer) if self.config.narrow else buffer, height > width, start)

    def reduce(self, bucket: str) -> Waiting:
        """Steps 2 to 7 and 12 for a block, 8 for what is outside."""
        if bucket in self._outside:
            yield from averaged(self._outside[bucket], self._replicas.mean)
            return
        matrices = [matrix for matrix in self._matrices[bucket] if matrix.parameter.grad is not None]
        if not matrices:
            return
        grads = [matrix.taken() for matrix in matrices]
        finite = _finite(grads)
        # In place: a gradient's memory holds E + G until that is packed again.
        errors = [grad.add_(matrix.error()) for matrix, grad in zip(matrices, grads, strict=True)]
        del grads
        # The "predetermined constants" of step 3, with which factors of numbers that 1-6-9 holds hardly ever reach its
        # end, Q never. Those of P cancel in step 5.
        p = [
            matrix.oriented(error) @ self.start(matrix) * _root(len(matrix.start))
            for matrix, error in zip(matrices, errors, strict=True)
        ]
        all_finite, all_good = yield from self._averaged(p, finite, _finite(p))
        if all_finite and all_good:
            p = self._orthonormal(p)
            sound = _finite(p)  # NaN has no code in 1-6-9: it would become the largest number
            if self.config.narrow:
                p = [E6M9.rounded(x) for x in p]
            q = [
                matrix.oriented(error).T @ x * _root(len(x))
                for matrix, error, x in zip(matrices, errors, p, strict=True)
            ]
            (all_good,) = yield from self._averaged(q, sound & _finite(q))
            q = [y / _root(len(x)) for x, y in zip(p, q, strict=True)]
            if all_good:
                for matrix, error, left, right in zip(matrices, errors, p, q, strict=True):
                    self.take(matrix, error, left, right)
                return
        for matrix, error in zip(matrices, errors, strict=True):
            if all_finite:  # or else nothing is added
                matrix.keep(error if error.isfinite().all() else torch.zeros_like(error))
            matrix.give(torch.full_like(error, torch.nan))

    def _averaged(self, factors: list[Tensor], *good: Tensor) -> Generator[distributed.Work, None, list[bool]]:
        """Each becomes its mean over replicas, all in one collective; with them travels whether each of `good` is true
        on all replicas, which is given back."""
        flat = torch.cat([x.flatten() for x in factors] + [(~flag).float().view(1) for flag in good])
        yield from self._replicas.coded_mean(flat, E6M9) if self.config.narrow else self._replicas.mean(flat)
        *values, wrong = flat.split([*(x.numel() for x in factors), len(good)])
        factors[:] = [x.view_as(before) for x, before in zip(values, factors, strict=True)]
        return [not flag for flag in wrong.tolist()]

    def finish(self) -> Waiting:
        """Steps 8, for vectors of the blocks, and 11."""
        yield from averaged(self._rest, self._replicas.mean)
        for matrix, p, q in self.factors:
            left, right = matrix.product(p, q)
            matrix.give(matrix.rounded(left @ right))
        self.factors.clear()

    @torch.no_grad()
    def put_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """P Q^T is in the buffer again, if it was finite: else step 12 has left the buffer as it was."""
        these = set(parameters)
        for matrix in self._all():
            if matrix.parameter in these and matrix.parameter.grad is not None:
                gradient = grad_access.grad_values(matrix.parameter.grad).flatten(1)
                if gradient.isfinite().all():
                    matrix.keep(matrix.error().add(gradient))

    def start(self, matrix: Matrix) -> Float[Tensor, "n r"]:
        """What a step's Q begins from. §2.5 fixes it "at the start of training"; others begin from the last Q."""
        return matrix.start

    def orthonormal(self, p: Float[Tensor, "k m r"]) -> Float[Tensor, "k m r"]:
        """Step 5, of matrices of one shape."""
        return orthonormal(p)

    def take(
        self, matrix: Matrix, error: Float[Tensor, "h w"], p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]
    ) -> None:
        """Step 12, which may write over `error`; P Q^T will be the gradient."""
        left, right = matrix.product(p, q)
        if matrix.parameter.dtype in HALVES:
            error.sub_(matrix.rounded(left @ right))
        else:
            error.addmm_(left, right, alpha=-1)
        matrix.keep(error)
        self.factors.append((matrix, p, q))

    def _orthonormal(self, factors: list[Float[Tensor, "m r"]]) -> list[Float[Tensor, "m r"]]:
        """Those of one shape together."""
        shapes: dict[torch.Size, list[int]] = {}
        for i, p in enumerate(factors):
            shapes.setdefault(p.shape, []).append(i)
        found = list(factors)
        for same in shapes.values():
            for i, p in zip(same, self.orthonormal(torch.stack([factors[i] for i in same])), strict=True):
                found[i] = p
        return found

    def _all(self) -> list[Matrix]:
        return [matrix for block in self._matrices.values() for matrix in block]

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def errors(self) -> dict[str, Tensor]:
        return {matrix.name: from_local(matrix.buffer, matrix.parameter) for matrix in self._all()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for matrix in self._all():
            if (error := tensors.get(matrix.name)) is not None:
                if error.shape != matrix.parameter.shape:
                    raise UserError(
                        f"the error buffer of {matrix.name!r} has shape {list(error.shape)}, where the model has "
                        f"{list(matrix.parameter.shape)}"
                    )
                matrix.keep(unpacked(shard_like(error.to(matrix.buffer.device), matrix.parameter)))


def _root(n: int) -> float:
    """About 1 / sqrt(n), as a power of two, which rounds nothing: E^T p of a column p of length 1 is at most sqrt(m)
    times the largest number of E."""
    return 2.0 ** -ceil(log2(n) / 2)


def _shards(p: Tensor) -> int:
    """In how many it is."""
    return cast(Any, p).device_mesh.size() if is_dtensor(p) else 1


def _finite(tensors: list[Tensor]) -> Tensor:
    """Whether all values are finite: [], by their sums, which are not if one of them is not."""
    return torch.stack([x.sum() for x in tensors]).isfinite().all()
