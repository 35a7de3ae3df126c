"""Cross-entropy of a linear layer's outputs, computed in chunks of rows.

In fp32, the logits of a large vocabulary and their gradient are the largest tensors of training. This module computes
the logits of a few rows at a time, adds their part to the loss and to the gradients, and frees them. It stores the
gradients of the summed loss, which the backward pass only scales: so nothing is computed twice, and no small number
passes through a 16-bit format.

Shapes: N positions, D width, V vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from limner.numerics.precision import acc_type, product

LOGITS_PER_CHUNK = 1 << 23  # logits of a chunk, which takes twice their size in fp32


def linear_cross_entropy(x: Float[Tensor, "N D"], layer: nn.Linear, target: Int64[Tensor, " N"]) -> Float[Tensor, ""]:
    """Return -sum of log softmax(layer(x))[target] over the positions whose target is not negative, fp32 [].

    x [N, D], target int64 [N]. Matrix products take autocast's format; logits and softmax are fp32. For x in fp64,
    everything is fp64. Equals `F.cross_entropy(layer(x).float(), target, ignore_index=-1, reduction="sum")`.
    """
    labeled = (target >= 0).nonzero().squeeze(1)
    if len(labeled) < len(target):
        x, target = x[labeled], target[labeled]
    return _SummedCrossEntropy.apply(x, layer.weight, layer.bias, target)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        kind, needs_grad = x.device.type, any(ctx.needs_input_grad)
        casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64  # autocast skips fp64
        dtype = torch.get_autocast_dtype(kind) if casts else x.dtype
        wide, matrix, rows = acc_type(dtype), weight.to(dtype), max(1, LOGITS_PER_CHUNK // len(weight))
        offset, loss = bias.to(wide), torch.zeros((), dtype=wide, device=x.device)
        x_grad = torch.empty_like(x)
        weight_grad, bias_grad = (torch.zeros_like(y if needs_grad else y[:0], dtype=wide) for y in (weight, bias))

        def add(part: Tensor, targets: Tensor, part_grad: Tensor) -> None:  # frees its logits on return
            values = product(part, matrix.mT).add_(offset).log_softmax(-1)
            loss.sub_(values.gather(1, targets[:, None]).sum())
            if needs_grad:  # d loss / d logits = softmax - 1 at the target
                values.exp_().scatter_add_(1, targets[:, None], values.new_full((len(targets), 1), -1))
                bias_grad.add_(values.sum(0))
                values = values.to(dtype)
                part_grad.copy_(values @ matrix)
                weight_grad.add_(product(values.mT, part))

        with torch.autocast(kind, enabled=False):
            for chunk in zip(x.to(dtype).split(rows), target.split(rows), x_grad.split(rows), strict=True):
                add(*chunk)
        ctx.save_for_backward(x_grad, weight_grad, bias_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the stored gradients would count as constants
            raise RuntimeError(
                "linear_cross_entropy cannot be differentiated twice: take F.cross_entropy of the model's logits"
            )
        return *(gradient * upstream[0] for gradient in ctx.saved_tensors), None
