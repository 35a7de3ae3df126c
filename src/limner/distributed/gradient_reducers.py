"""Gradient reduction between replicas, bucket by bucket, in formats of 32 and of 16 bits.

A replica is a process, or a group of processes that shards a set of weights. Processes that hold the same shard reduce
its gradients together. A bucket holds the parameters of a resblock, of the embeddings, or of the head.
`overlapped_reducer.py` reduces it during the backward pass.

Shapes: n values of a process, R replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, distributed, nn

from limner.blocks import named_blocks, resblocks
from limner.numerics.formats import E6M9, FloatFormat
from limner.optim import grad_access
from limner.optim.dtensor import to_local
from limner.training.parallel import ReductionState

__all__ = [
    "Bf16Codec", "Bf16Reducer", "Bucket", "Codec", "Fp32Reducer", "PendingWork", "Replicas", "average_grads", "buckets",
    "unpack_error",
]  # fmt: skip

PendingWork = Iterator[distributed.Work]  # yields communication to wait for; ends when all is done


class Bf16Codec:
    """bfloat16, the upper half of fp32, with the interface of `FloatFormat`."""

    pack, unpack = staticmethod(Tensor.bfloat16), staticmethod(Tensor.float)


Codec = FloatFormat | type[Bf16Codec]  # a format for sending values


@dataclass
class Replicas:
    """The processes of the replicas that hold the same part of the weights.

    Attributes:
        group: their process group.
        sent: bytes sent by this process, from the collectives' cost formulas.
    """

    group: distributed.ProcessGroup
    sent: int = 0

    @property
    def count(self) -> int:
        return self.group.size()

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        """Replace values by their mean over the replicas, in fp32. A ring sends each value 2 (R - 1) / R times."""
        if self.count > 1:
            self.sent += 2 * values.nbytes * (self.count - 1) // self.count
            yield cast(distributed.Work, distributed.all_reduce(values, group=self.group, async_op=True))
            values /= self.count

    def compressed_mean(self, values: Float[Tensor, " n"], codec: Codec) -> PendingWork:
        """Replace values by their mean over the replicas, sent in the format of `codec` and summed in fp32.

        Each replica averages one part of the values (all-to-all) and sends the mean to all (all-gather). Codes are
        sent as bytes, because gloo does not support 16-bit integers.
        """
        codes = codec.pack(F.pad(values, (0, -values.numel() % self.count)))
        if self.count > 1:
            send, recv = codes.view(torch.uint8), torch.empty_like(codes)
            self.sent += 2 * send.numel() * (self.count - 1) // self.count
            work = distributed.all_to_all_single(recv.view(torch.uint8), send, group=self.group, async_op=True)
            yield cast(distributed.Work, work)
            mean = codec.pack(codec.unpack(recv).view(self.count, -1).mean(0))
            parts = list(send.view(self.count, -1))
            work = distributed.all_gather(parts, mean.view(torch.uint8), group=self.group, async_op=True)
            yield cast(distributed.Work, work)
        values.copy_(codec.unpack(codes)[: values.numel()])


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together, by name. `in_block`: they belong to a block, whose matrices may
    be compressed."""

    parameters: Mapping[str, nn.Parameter]
    in_block: bool


def buckets(model: nn.Module) -> dict[str, Bucket]:
    """Return the buckets of a model by name. A bucket is a resblock, or a block without resblocks.
    Other parameters form one bucket for each child of the model, and "" for its direct parameters."""
    blocks = {*named_blocks(model), *resblocks(model)}
    parameters: dict[str, dict[str, nn.Parameter]] = {}
    for name, p in model.named_parameters():
        path = name.split(".")
        ancestors = [".".join(path[:i]) for i in range(len(path) - 1, 1, -1)]  # the innermost first
        bucket = next((module for module in ancestors if module in blocks), path[0] if len(path) > 1 else "")
        parameters.setdefault(bucket, {})[name] = p
    return {bucket: Bucket(entry, bucket in blocks) for bucket, entry in parameters.items()}


class Fp32Reducer(ReductionState):
    """Averages gradients over replicas in fp32. Subclasses override `mean` to send values in another format, or the
    other methods to average in another way.

    Attributes:
        buckets, replicas: arguments of `attach`.
    """

    buckets: Mapping[str, Bucket]
    replicas: Replicas

    def attach(self, buckets: Mapping[str, Bucket], replicas: Replicas) -> None:
        """Set the buckets by name, once, before the first step. Raises `UserError` if the method cannot be applied to
        them."""
        self.buckets, self.replicas = buckets, replicas

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        """Replace values, the concatenated gradients of a bucket, by their mean over the replicas."""
        return self.replicas.mean(values)

    def reduce(self, bucket: str) -> PendingWork:
        """Start reducing a bucket whose gradients are complete."""
        return average_grads(self.buckets[bucket].parameters.values(), self.mean)

    def finish(self) -> PendingWork:
        """Complete the reduction after `reduce` has ended for all buckets: each `grad` becomes the mean, unless `parts`
        sets it. A gradient not finite on one replica is so on all."""
        yield from ()

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the entries of `state_dict` and `error_buffers` together. Raises `UserError` if a shape differs."""


def average_grads(params: Iterable[nn.Parameter], mean: Callable[[Float[Tensor, " n"]], PendingWork]) -> PendingWork:
    """Concatenate the gradients of the parameters, apply `mean`, and write the result back to them."""
    grads = [p.grad for p in params if p.grad is not None]
    parts = [grad_access.grad_values(grad) for grad in grads]
    if sum(part.numel() for part in parts):
        flat = torch.cat([part.flatten().float() for part in parts])
        yield from mean(flat)
        for grad, part, values in zip(grads, parts, flat.split([part.numel() for part in parts]), strict=True):
            grad_access.set_grad_values(grad, values.view_as(part))


class Bf16Reducer(Fp32Reducer):
    """Averages gradients sent in bfloat16 and summed in fp32."""

    def mean(self, values: Float[Tensor, " n"]) -> PendingWork:
        return self.replicas.compressed_mean(values, Bf16Codec)


def unpack_error(error: Tensor) -> Tensor:
    """Return the values of an error buffer, or of this process's shard if the buffer is sharded."""
    shard = to_local(error)
    return shard if shard.is_floating_point() else E6M9.unpack(shard)
