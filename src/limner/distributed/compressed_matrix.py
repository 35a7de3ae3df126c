"""A matrix whose gradient is sent as two factors: its error buffer, and its gradient made from the factors.

Shapes: m x n a matrix's shard with m <= n, h x w the shard as it is stored, r directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from limner.distributed.gradient_reducers import unpack_error
from limner.numerics.formats import E6M9
from limner.optim import grad_access
from limner.optim.dtensor import from_local, to_local


@dataclass
class Matrix:
    """A matrix of a block, or this process's shard of it."""

    name: str
    parameter: nn.Parameter
    buffer: Tensor  # E in the shape of the shard, in fp32 or as codes
    q0: Tensor  # [n, r], stored as E; §2.5 fixes it "at the start of training", Vogels et al. take the last Q
    transposed: bool  # True if the shard has more rows than columns
    grad_scale: Tensor | None = None  # pending scale of a gradient in 16 bits (`optim/grad_access.py`)

    def pop_grad(self) -> Float[Tensor, "h w"]:
        """Return the gradient in fp32, shaped as the shard, and set the parameter's `grad` to None."""
        grad = cast(Tensor, self.parameter.grad)
        self.grad_scale, self.parameter.grad = grad_access.pending_scale(grad), None
        return grad_access.grad_values(grad).flatten(1)

    def set_grad(self, gradient: Float[Tensor, "h w"]) -> None:
        """Set the gradient of the parameter."""
        weight, scale = to_local(self.parameter.detach()), self.grad_scale
        gradient = gradient if scale is None else gradient * scale
        # In the parameter's own layout: fused optimizers ignore strides.
        if (weight.stride(), weight.dtype) != (gradient.stride(), gradient.dtype):
            gradient = torch.empty_like(weight).copy_(gradient.view(weight.shape))
        self.parameter.grad = from_local(gradient, self.parameter)
        if scale is not None:
            grad_access.unscale(self.parameter.grad, scale)

    def set_nonfinite_grad(self) -> None:
        """Set the gradient to NaN, without memory for its values."""
        weight = to_local(self.parameter.detach())
        self.parameter.grad = from_local(weight.new_full((), torch.nan).expand(weight.shape), self.parameter)

    def accumulate_grad(self) -> Bool[Tensor, ""]:
        """Add the gradient to E if it is finite, and set it to None (step 2). Return False if G or
        the sum is not finite."""
        gradient = self.pop_grad()
        finite = gradient.sum().isfinite()
        total = torch.where(finite, gradient, 0).add_(self.error())
        self.store_error(total)
        return finite & total.sum().isfinite()

    def oriented_error(self) -> Float[Tensor, "m n"]:
        """Return E in fp32."""
        return self.error().T if self.transposed else self.error()

    def error(self) -> Float[Tensor, "h w"]:
        """Return E in fp32, shaped as the shard."""
        return unpack_error(self.buffer).flatten(1)

    def store_error(self, error: Float[Tensor, "h w"]) -> None:
        error = error.view(self.buffer.shape)
        if self.buffer.is_floating_point():
            self.buffer.copy_(error)
        else:
            E6M9.pack(error, out=self.buffer)

    def product(self, p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]) -> tuple[Tensor, Tensor]:
        """Return factors [h, r] and [r, w] of P Q^T, shaped as the shard."""
        return (q, p.T) if self.transposed else (p, q.T)

    def rounded_product(self, p: Float[Tensor, "m r"], q: Float[Tensor, "n r"]) -> Float[Tensor, "h w"]:
        """Return P Q^T, shaped as the shard and rounded to the parameter's format."""
        left, right = self.product(p, q)
        return grad_access.round_to_storage(left @ right, self.parameter.dtype, self.grad_scale)
