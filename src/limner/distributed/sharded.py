"""Every process holds a part of each weight: parameters are sharded (Ramesh et al. 2021, §2.5; FSDP2).

Each block's weights are gathered while its neighbours compute, in the forward pass the two blocks before it and in the
backward pass the one after it, and dropped at once after use; the last block, which the backward pass begins with,
keeps its weights until then. Full gradients are reduced to shards as soon as a block's are there (Figure 5). Linear
layers that compute in 16 bits are gathered in 16 bits; gradients are summed in fp32. What is outside the blocks
(embeddings, heads, norms) is one more group, which stays gathered from the forward to the backward pass. Single
numbers, such as a temperature, each process holds itself. So weights, gradients, averages and optimiser state take 1/W
of their memory on each of W processes.

With `replicas`, groups of processes hold the same shards: W / replicas processes share a set of weights, and gradients
are reduced within a group first, by FSDP, then between groups, by a `GradientReducer`. (FSDP could do both, but never
with compression, and on CPUs it waits for the second.)
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from limner.distributed.gradient_reducers import Plain, twice
from limner.distributed.p2p_collectives import exchange, gather
from limner.distributed.replicated import Make, Replicated
from limner.distributed.sharded_checkpoint import Folder, Shards
from limner.distributed.sharded_init import cut_before, in_shards
from limner.errors import UserError
from limner.layers.half_linear import HalfLinear
from limner.optim.dtensor import full_tensor, is_dtensor, shard_dim, to_local

_AHEAD = 2  # blocks gathered before it is their turn: with one, a link stands still until the next block begins


class Sharded(Replicated):
    """The strategy of a process of the default process group; see `Parallel`.

    Args:
        replicas: groups of processes, each of which holds all weights together.
        make: a reducer for each model that is trained; by default gradients travel between replicas in fp32.

    Raises `UserError` if `replicas` does not divide the processes.
    """

    drops = True  # a block's weights after its forward pass, if others follow: the backward pass gathers them again

    def __init__(self, replicas: int = 1, make: Make | None = None) -> None:
        super().__init__(make)
        if self.world % replicas:
            raise UserError(
                f"{self.world} processes cannot hold {replicas} replicas: choose a divisor of {self.world}, or "
                "--replicas machines, which follows the number of machines"
            )
        sizes = (replicas, self.world // replicas)
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard"))
        self._modules: list[FSDPModule] = []
        self._single: list[nn.Parameter] = []
        self._scatter = _Scatter(0)

    def checkpointer(self, files: Folder) -> Shards:
        """See `Parallel`."""
        return Shards(files, self.mesh["replicate"].size(), self.mesh.get_local_rank("replicate"))

    @contextmanager
    def building(self) -> Iterator[None]:
        """See `Parallel`. All draw the numbers that the first process would."""
        state = torch.get_rng_state()
        self._alike(state, distributed.group.WORLD)
        torch.set_rng_state(state)
        with in_shards(self._shard):
            yield

    def _shard(self, p: Tensor) -> Tensor:
        """This process's part of a whole parameter. (Kernels of convolutions, channels-last, FSDP could not cut.)"""
        mesh = self.mesh["shard"]
        return distribute_tensor(p.contiguous(), mesh, [self._cut(p)], src_data_rank=None)

    def prepare(self, trainable: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """See `Parallel`. A model that was built otherwise than in `building` is whole on each process before."""
        self._modules, self._scales = [], {}
        layers = [x for x in trainable.modules() if isinstance(x, HalfLinear) and x.bias is not None]
        for layer in layers:  # FSDP's groups have one format, and these biases are a few thousandths of a layer
            layer.bias = nn.Parameter(full_tensor(layer.bias.detach()), layer.bias.requires_grad)
        self._single = [layer.bias for layer in layers]
        self._single += [p for p in trainable.parameters() if p.ndim == 0]  # which cannot be sharded
        for p in self._single:
            p.data = p.data.to(device)
            self._alike(p.detach(), distributed.group.WORLD)
        with cut_before(trainable, self._begun, self._single):
            self._divide(trainable, dtype)
        if self._make or self.mesh["replicate"].size() > 1:
            self._reduced(trainable, self.mesh["replicate"].get_group(), self._make or Plain)
        elif distributed.get_backend() == "gloo":  # a reducer would read gradients as soon as FSDP has scattered them
            own = [module for module in self._modules if not isinstance(module, HalfLinear)]
            self._scatter = _Scatter(len(own))
            for module in own:
                module.set_custom_reduce_scatter(self._scatter)  # pyright: ignore[reportArgumentType]
        return trainable

    def _begun(self, p: Tensor) -> Tensor:
        """What this process trains of a parameter: the first process's values, or those of the first replica."""
        if not is_dtensor(p):
            self._alike(p, distributed.group.WORLD)
            return self._shard(p)
        p = p.contiguous()
        self._alike(to_local(p), self.mesh["replicate"].get_group())
        return p

    def _divide(self, trainable: nn.Module, dtype: torch.dtype) -> None:
        """Let FSDP gather and scatter in groups: a block of a module list is one, the rest is another one."""
        lists = [module for module in trainable.modules() if isinstance(module, nn.ModuleList)]
        first: list[FSDPModule] = []
        for blocks in lists:
            groups = [self._groups(block, dtype, self.drops and block is not blocks[-1]) for block in blocks]
            ahead = [list(chain.from_iterable(groups[i : i + _AHEAD])) for i in range(len(groups) + 1)]
            for (group, *_), after in zip(groups, ahead[1:], strict=True):
                group.set_modules_to_forward_prefetch(after)
            self._modules += chain.from_iterable(groups)
            first = first or ahead[0]
        rest = fully_shard(
            trainable, mesh=self.mesh["shard"], shard_placement_fn=self._cut, ignored_params=set(self._single)
        )
        rest.set_modules_to_forward_prefetch(first)
        self._modules.append(rest)
        if self.device.type == "cpu" and (overlap := getattr(rest, "_set_unshard_async_op", None)):
            overlap(True)  # GPUs gather in a stream of their own; without it gloo gathers when it is waited for
        if distributed.get_backend() == "gloo" and self.mesh["shard"].size() == 2:  # why two, `gather` says
            for module in self._modules:
                module.set_custom_all_gather(_Gather())  # pyright: ignore[reportArgumentType]

    def _groups(self, block: nn.Module, dtype: torch.dtype, drops: bool) -> list[FSDPModule]:
        """A block's, its own first. Linear layers in 16 bits are gathered in 16 bits, which is how autocast would round
        them afterwards. Gains stay fp32, and gradients are summed in fp32."""
        halves = [module for module in block.modules() if isinstance(module, HalfLinear)]
        linear = halves or [module for module in block.modules() if type(module) is nn.Linear]
        inner: list[FSDPModule] = []
        if dtype != torch.float32 and linear:
            # Nothing changes a linear layer's output in place.
            warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDP(Half)?Linear.* returned a view tensor")
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            fully_shard(
                linear, mesh=self.mesh["shard"], shard_placement_fn=self._cut, mp_policy=policy,  # pyright: ignore
                reshard_after_forward=drops, ignored_params=set(self._single),
            )  # fmt: skip
            inner = [linear[0]]  # pyright: ignore
        own = fully_shard(block, mesh=self.mesh["shard"], shard_placement_fn=self._cut, reshard_after_forward=drops)
        return [own, *inner]

    def _cut(self, p: Tensor) -> Shard:
        return Shard(shard_dim(p.shape, self.mesh["shard"].size()))

    @contextmanager
    def part(self, last: bool) -> Iterator[None]:
        """See `Parallel`. Gradients of earlier micro-batches stay whole, on the process that has them."""
        self._modules[-1].set_requires_gradient_sync(last)
        with super().part(last):
            yield

    def gathered(self) -> AbstractContextManager[object]:
        """See `Parallel`."""
        return self._gathered() if self._modules else nullcontext()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        self._modules[-1].unshard()  # what is outside the blocks; these are gathered where they are called, one by one
        yield
        for module in self._modules:
            module.reshard()  # the next forward pass has other weights

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """The backward pass has done it, but for single numbers and the last of what it sent."""
        self._scatter.finish()
        super().reduce(parameters)
        grads = [p.grad for p in self._single if p.grad is not None]
        if grads:
            parts = self.mean(torch.cat([grad.flatten() for grad in grads])).split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Parallel`."""
        self._check(parameters, self.mesh["replicate"].get_group())


class _Gather:
    """Gathers weights of groups for two processes, in both directions of their link at once."""

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, async_op: bool = False
    ) -> distributed.Work | None:
        work = gather(input_tensor, output_tensor.view(group.size(), -1), group)
        if async_op:
            return work
        work.wait()
        return None


class _Scatter:
    """Scatters gradients of groups by gloo while the backward pass goes on, as FSDP does on GPUs in a stream of its
    own. On CPUs FSDP waits for each group where it is sent; and gloo sums whole gradients on all processes and then
    takes a part, which sends twice as much. FSDP gives views of `output_tensor` to parameters: they are filled later,
    so that it must not add to them meanwhile: each of the `groups` comes once before `finish`, or else the backward
    pass raises `UserError`.
    """

    _LAG = 1  # groups on their way while another one begins: each holds its gradients twice

    def __init__(self, groups: int) -> None:
        self._groups, self._begun = groups, 0
        self._going: deque[tuple[distributed.Work, Tensor, Tensor, Tensor]] = deque()

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, op: object,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """`op` is the mean: nothing asks FSDP for another one."""
        if self._begun == self._groups:
            raise twice("a block")
        self._begun += 1
        given = input_tensor.view(group.size(), -1)
        got = torch.empty_like(given)
        self._going.append((exchange(given, got, group), input_tensor, got, output_tensor))
        self._wait(self._LAG)

    def finish(self) -> None:
        self._wait(0)
        self._begun = 0

    def _wait(self, but: int) -> None:
        """For all `but` so many that were begun last."""
        while len(self._going) > but:
            work, _, got, output = self._going.popleft()
            work.wait()
            torch.mean(got, 0, out=output)


class Zero2(Sharded):
    """As `Sharded`, but weights stay whole from the forward pass to the end of the backward pass (Rajbhandari et al.
    2020, stage 2): gathered once per update and not twice, so that nearly a third less is sent. Gradients, averages and
    optimiser state are in shards still.
    """

    drops = False


#: By the words of `--parallel`.
KINDS: dict[str, type[Sharded]] = {"sharded": Sharded, "zero2": Zero2}
