"""Dry run of a launch in one process, as its first rank, on tensors with shapes and without values.

The process joins a `fake` group of the launch's size, whose collectives return immediately. Under `FakeTensorMode`
nothing is stored or computed, but every operation is dispatched as on a cluster: `TrainState` and `update` build,
convert, shard and train the model, with the recipe's optimizer, clipping and averages. Torch's trackers count FLOPs in
the first step, which also allocates moments, and memory in the second. Wrong shapes and settings of a launch on a
thousand GPUs therefore raise the same errors here.

A step reads two kinds of values. Scalars that the host reads (a loss, a step count) are 1. Captions are unpadded, so
that every position is a target, which takes the most memory.

PowerSGD is not covered: a dry run reduces uncompressed gradients.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.flop_counter import FlopCounterMode

from limner import compat
from limner.attention.sparse import SparseAttention
from limner.compat import FakeStore, FakeTensor, FakeTensorMode, TorchDispatchMode
from limner.distributed.sharded import KINDS
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import to_local
from limner.planner.cost import Shape
from limner.planner.launch import Launch
from limner.planner.trackers import CollectiveCounter, MemoryTracker, storage_bytes
from limner.training.step import update
from limner.training.train_module import Batch
from limner.training.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepUsage:
    """Memory in bytes and collectives of a process in a training step.

    Args:
        state: of weights, gradients, moments, averaged weights.
        activations: left by the first forward pass, without gathered weights.
        peak: maximum in the step.
        calls, sent: number and bytes of collectives, as in `CollectiveCounter`.
    """

    state: dict[str, int]
    activations: int
    peak: int
    calls: Counter[str]
    sent: Counter[str]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Result for the first rank of a launch.

    Args:
        shards: full shape and shard shape, by parameter name.
        flops: of the step's products in 16 and 32 bits.
        step: memory and collectives.
    """

    shards: dict[str, tuple[Shape, Shape]]
    flops: int
    step: StepUsage


def dry_run(launch: Launch) -> DryRun:
    """Run two steps of the launch: seconds for a small model, minutes for the largest.

    Raises `RuntimeError` if the process is already in a process group.
    """
    if distributed.is_initialized():
        raise RuntimeError("this process is already in a process group: start the dry run in a separate process")
    training = launch.training
    if training.ema_on_cpu:  # outside GPU memory
        training = replace(training, ema_decay=None)
    if type(training.precision) in (Auto, Fp16):  # independent of this processor; all 16-bit formats have one size
        training = replace(training, precision=Bf16())
    rows, (h, w) = launch.samples * training.accumulate, launch.config.grid
    sizes = {"text": (rows, launch.config.text_len), "image": (rows, h * w)}
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=launch.gpus)
    try:
        parallel = KINDS[launch.kind](launch.replicas)  # outside FakeTensorMode: the device mesh needs values
        with torch.random.fork_rng([]), FakeTensorMode(), _FakeValues():
            memory = MemoryTracker()
            with memory:
                model = _build_for_gpu(launch.config)
                full_shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
                run = TrainState(model, Autoregressive(), training, "cpu", parallel)
                batch = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
                with FlopCounterMode(display=False, custom_mapping={torch.ops.limner.product: _product_flops}) as flops:
                    update(run, batch)
            gc.collect()  # the modules' hooks of this mode form cycles with activations
            step = measure_step(run, batch, memory, launch.retained_bytes)
            return DryRun(
                shards={name: (full_shapes[name], tuple(to_local(p).shape)) for name, p in model.named_parameters()},
                flops=flops.get_total_flops(),
                step=step,
            )
    finally:
        distributed.destroy_process_group()


def _build_for_gpu(config: TransformerConfig) -> nn.Module:
    """Build a model whose sparse attention has the chunk size of a GPU."""
    model = config.build()
    for name, core in model.attention_fns.items():
        if isinstance(core, SparseAttention):
            model.attention_fns[name] = _GPUSparseAttention(core.pattern, core.prefix)
    return model


def measure_step(run: TrainState, batch: Batch, memory: MemoryTracker, retained: int) -> StepUsage:
    """Measure a training step of a run that was built under the tracker. `retained`: bytes of weights that stay
    gathered between the passes."""
    activations: list[int] = []
    state: dict[str, int] = {}
    with memory, CollectiveCounter() as collectives:
        before = memory.current + retained
        handles = (
            run.wrapped.register_forward_hook(lambda *_: activations.append(memory.current - before)),
            run.optimizers[0].register_step_pre_hook(lambda *_: state.update(state_bytes(run))),
        )
        update(run, batch)
    for handle in handles:
        handle.remove()
    return StepUsage(
        state=state, activations=activations[0], peak=memory.peak, calls=collectives.calls, sent=collectives.sent
    )


def state_bytes(run: TrainState) -> dict[str, int]:
    """Return the bytes of this process's weights, gradients, moments and averaged weights, each storage once."""
    moments = [v for o in run.optimizers for state in o.state.values() for v in state.values() if isinstance(v, Tensor)]
    sizes = {
        "weights": storage_bytes(run.parameters),
        "gradients": storage_bytes(p.grad for p in run.parameters if p.grad is not None),
        "moments": storage_bytes(v for v in moments if v.ndim),  # without step counts
    }
    return sizes | ({"averaged weights": storage_bytes(run.ema.parameters.values())} if run.ema else {})


def _product_flops(a: Shape, b: Shape, **_: Any) -> int:
    """Return the FLOPs of `product`, from the shapes of its arguments."""
    return 2 * prod(a) * b[-1]


class _FakeValues(TorchDispatchMode):
    """Mode that returns values for operations that fake tensors do not support (see the module docstring)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            if func is compat.local_scalar_dense:
                return 1
            if func is torch.ops.aten.nonzero.default:
                return torch.arange(args[0].numel())[:, None]
        return func(*args, **(kwargs or {}))


class _GPUSparseAttention(SparseAttention):
    """Sparse attention with the chunk size of a GPU."""

    def sequences_per_part(self, device: str) -> int:
        return super().sequences_per_part("cuda")
