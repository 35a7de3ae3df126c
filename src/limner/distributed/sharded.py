"""Parameter sharding: every process holds a shard of each weight (Ramesh et al. 2021, §2.5; FSDP2).

A block's weights are gathered while neighboring blocks compute: the two blocks before it in the forward pass, the one
after it in the backward pass. They are freed after use, except those of the last block, with which the backward pass
starts. A block's gradients are reduced to shards once they are complete (Figure 5). Linear layers that compute in
16 bits are gathered in 16 bits; gradients are summed in fp32. Parameters outside the blocks (embeddings, heads, norms)
are one more group, which stays gathered from the forward to the backward pass. Scalars, such as a temperature, are not
sharded. Weights, gradients, averages and optimizer state thus take 1/W of their memory on each of W processes.

With `replicas`, W / replicas processes share a set of weights. Gradients are first reduced within such a group by FSDP,
then between groups by a reducer. (FSDP can do both, but without compression, and on CPUs it blocks during the
second reduction.)
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from limner.blocks import block_lists
from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.overlapped_reducer import double_backward_error
from limner.distributed.p2p_collectives import all_gather, all_to_all
from limner.distributed.replicated import ReducerFactory, Replicated
from limner.distributed.sharded_init import shard_in_place, shard_on_registration
from limner.errors import UserError
from limner.optim.dtensor import full_tensor, is_dtensor, shard_dim, to_local
from limner.quantization import HalfLinear
from limner.training.parallel import Reduction
from limner.training.train_module import Trainable

PREFETCHED_BLOCKS = 2  # blocks gathered in advance: with one, the link is idle until the next block begins


class Sharded(Replicated):
    """The strategy of a process of the default process group.

    Args:
        replicas: number of groups of processes that each hold a complete set of weights.
        make_reducer: as for `Replicated`, but averages replicas in fp32 without a rank.

    Raises `UserError` if `replicas` does not divide the number of processes.
    """

    reshard_after_forward = True  # free weights of all blocks but the last after forward: backward gathers them again

    def __init__(self, replicas: int = 1, make_reducer: ReducerFactory | None = None) -> None:
        super().__init__(make_reducer)
        if self.world_size % replicas:
            raise UserError(
                f"{self.world_size} processes cannot hold {replicas} replicas: choose a divisor of {self.world_size}, "
                "or --dp-replicate per-node, which follows the number of machines"
            )
        sizes = (replicas, self.world_size // replicas)
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard"))
        self.mesh, self.replica_group = mesh["shard"], mesh["replicate"].get_group()
        self._modules: list[FSDPModule] = []
        self._replicated: list[nn.Parameter] = []
        self._reduce_scatter = _ReduceScatter(0)

    @contextmanager
    def init_context(self) -> Iterator[None]:
        """All processes draw the random numbers of the first one."""
        state = torch.get_rng_state()
        self._broadcast(state, distributed.group.WORLD)
        torch.set_rng_state(state)
        with shard_on_registration(self._shard):
            yield

    def _shard(self, p: Tensor) -> Tensor:
        """Return this process's shard of a parameter, made contiguous: FSDP cannot shard channels-last kernels."""
        return distribute_tensor(p.contiguous(), self.mesh, [self._sharding(p)], src_data_rank=None)

    def prepare(self, trainable: Trainable, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """A model that was not built in `init_context` must be complete on each process."""
        self._modules, self._replicated, self.reduction = [], [], Reduction()
        for layer in trainable.modules():
            if isinstance(layer, HalfLinear) and layer.bias is not None:
                # An FSDP group has one dtype; these biases are small enough not to shard.
                layer.bias = nn.Parameter(full_tensor(layer.bias.detach()), layer.bias.requires_grad)
                self._replicated.append(layer.bias)
        self._replicated += [p for p in trainable.parameters() if p.ndim == 0]  # scalars cannot be sharded
        for p in self._replicated:
            p.data = p.data.to(device)
            self._broadcast(p.detach(), distributed.group.WORLD)
        with shard_in_place(trainable, self._initial_shard, self._replicated):
            self._apply_fsdp(trainable, dtype)
        make_reducer = self._choose_reducer()
        if make_reducer or self.replica_group.size() > 1:
            self._attach_reducer(trainable, make_reducer or Fp32Reducer)
        elif distributed.get_backend() == "gloo":  # only here: a reducer reads gradients directly after FSDP's scatter
            fp32_groups = [module for module in self._modules if not isinstance(module, HalfLinear)]
            self._reduce_scatter = _ReduceScatter(len(fp32_groups))
            for module in fp32_groups:
                module.set_custom_reduce_scatter(self._reduce_scatter)  # pyright: ignore[reportArgumentType]
        return trainable

    def _initial_shard(self, p: Tensor) -> Tensor:
        """Return this process's shard of a parameter, with the values of the first process or replica."""
        if not is_dtensor(p):
            self._broadcast(p, distributed.group.WORLD)
            return self._shard(p)
        p = p.contiguous()
        self._broadcast(to_local(p), self.replica_group)
        return p

    def _apply_fsdp(self, trainable: nn.Module, dtype: torch.dtype) -> None:
        """Apply FSDP in groups: one for each block of a module list, one for the other parameters."""
        first: list[FSDPModule] = []
        for blocks in block_lists(trainable).values():
            resharded = list(blocks)[:-1] if self.reshard_after_forward else []
            groups = [self._fsdp_groups(block, dtype, block in resharded) for block in blocks]
            ahead = [list(chain.from_iterable(groups[i : i + PREFETCHED_BLOCKS])) for i in range(len(groups) + 1)]
            for (group, *_), following in zip(groups, ahead[1:], strict=True):
                group.set_modules_to_forward_prefetch(following)
            self._modules += chain.from_iterable(groups)
            first = first or ahead[0]
        rest = fully_shard(
            trainable, mesh=self.mesh, shard_placement_fn=self._sharding, ignored_params=set(self._replicated)
        )
        rest.set_modules_to_forward_prefetch(first)
        self._modules.append(rest)
        if self.device.type == "cpu" and (overlap := getattr(rest, "_set_unshard_async_op", None)):
            overlap(True)  # GPUs gather in a separate stream; gloo overlaps only with this option
        if distributed.get_backend() == "gloo" and self.mesh.size() == 2:  # see `all_gather` on the limit
            for module in self._modules:
                module.set_custom_all_gather(_AllGather())  # pyright: ignore[reportArgumentType]

    def _fsdp_groups(self, block: nn.Module, dtype: torch.dtype, reshard: bool) -> list[FSDPModule]:
        """Apply FSDP to a block and return its groups, the block's main group first. Linear layers are gathered in the
        16-bit format to which autocast would round them. Gains stay fp32, and gradients are summed in fp32."""
        halves = [module for module in block.modules() if isinstance(module, HalfLinear)]
        linear = halves or [module for module in block.modules() if type(module) is nn.Linear]
        inner: list[FSDPModule] = []
        shards: Any = {"mesh": self.mesh, "shard_placement_fn": self._sharding, "reshard_after_forward": reshard}
        if dtype != torch.float32 and linear:
            # The warning is about in-place changes of a linear layer's output; no code makes them.
            warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDP(Half)?Linear.* returned a view tensor")
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            fully_shard(linear, mp_policy=policy, ignored_params=set(self._replicated), **shards)  # pyright: ignore
            inner = [linear[0]]  # pyright: ignore
        return [fully_shard(block, **shards), *inner]

    def _sharding(self, p: Tensor) -> Shard:
        return Shard(shard_dim(p.shape, self.mesh.size()))

    @contextmanager
    def _microbatch(self, last: bool) -> Iterator[None]:
        """Gradients of earlier micro-batches stay unsharded on their process."""
        self._modules[-1].set_requires_gradient_sync(last)
        with super()._microbatch(last):
            yield

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        for module in self._modules[-1:]:
            module.unshard()  # parameters outside the blocks; a call of a block gathers the block
        yield
        for module in self._modules:
            module.reshard()  # weights may change before the next forward pass

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for the last gradients that the backward pass sent, and average those of scalars."""
        self._reduce_scatter.finish()
        super().reduce(parameters)
        grads = [p.grad for p in self._replicated if p.grad is not None]
        if grads:
            parts = self.mean(torch.cat([grad.flatten() for grad in grads])).split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))


class _Allocator:
    """The allocation of buffers that FSDP asks of a collective."""

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocator):
    """All-gather of FSDP for two processes on gloo, in both directions of their link (`p2p_collectives.py`)."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, async_op: bool = False
    ) -> distributed.Work | None:
        work = all_gather(input_tensor, output_tensor.view(group.size(), -1), group)
        if async_op:
            return work
        work.wait()
        return None


class _ReduceScatter(_Allocator):
    """Reduce-scatter of FSDP on gloo, overlapped with the backward pass.

    On CPUs FSDP waits for each group when it sends it, and gloo's reduce-scatter is an all-reduce, which sends twice as
    much. Gradients of parameters are views of `output_tensor`, which is filled later; FSDP must not add to them before.
    Each of the `groups` must therefore arrive once before `finish`; otherwise the backward pass raises `UserError`.
    """

    MAX_IN_FLIGHT = 1  # groups in flight when another one starts: each holds its gradients twice

    def __init__(self, groups: int) -> None:
        self._groups, self._started = groups, 0
        self._in_flight: deque[tuple[distributed.Work, Tensor, Tensor, Tensor]] = deque()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, op: object,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """Start the exchange of a group. `op` is always the mean, FSDP's default."""
        if self._started == self._groups:
            raise double_backward_error("a block")
        self._started += 1
        sent = input_tensor.view(group.size(), -1)
        received = torch.empty_like(sent)
        self._in_flight.append((all_to_all(sent, received, group), input_tensor, received, output_tensor))
        self._wait(self.MAX_IN_FLIGHT)

    def finish(self) -> None:
        self._wait(0)
        self._started = 0

    def _wait(self, remaining: int) -> None:
        """Wait for all groups except the `remaining` latest ones."""
        while len(self._in_flight) > remaining:
            work, _, received, output = self._in_flight.popleft()
            work.wait()
            torch.mean(received, 0, out=output)


class Zero2(Sharded):
    """ZeRO stage 2 (Rajbhandari et al. 2020): `Sharded`, but weights stay gathered from the forward pass to the end of
    the backward pass. Gathering once instead of twice per update sends nearly a third less. Gradients, averages and
    optimizer state are sharded.
    """

    reshard_after_forward = False


#: Strategies by the values of `--parallel`.
KINDS: dict[str, type[Sharded]] = {"fsdp": Sharded, "zero2": Zero2}
