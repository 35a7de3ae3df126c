"""Dry run of a launch in one process, as its first rank, on tensors with shapes and without values.

The process joins a `fake` group of the launch's size, whose collectives return immediately. Under `FakeTensorMode`
nothing is stored or computed, but every operation is dispatched as on a cluster: `TrainState` and `update` build,
convert, shard and train the model for a step, with the recipe's optimizer, clipping and averages. `MemoryTracker`
counts bytes and collectives. Wrong shapes and settings of a launch on a thousand GPUs therefore raise the same errors
here.

A step reads two kinds of values. Scalars that the host reads (a loss, a step count) are 1. Captions are unpadded, so
that every position is a target, which takes the most memory.

PowerSGD is not covered: a dry run reduces uncompressed gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from limner import compat
from limner.attention.sparse import SparseAttention
from limner.compat import FakeStore, FakeTensor, FakeTensorMode
from limner.distributed.sharded import KINDS
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import to_local
from limner.planner.cost import Shape
from limner.planner.launch import Launch
from limner.planner.memory_tracker import MemoryTracker, storage_bytes
from limner.training.hooks import Hook
from limner.training.parallel import SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Memory in bytes and collectives of the first rank of a launch in a step.

    Args:
        shards: full shape and shard shape, by parameter name.
        sizes: as in `MemoryHook`.
        calls, sent: number and bytes of collectives, as in `MemoryTracker`.
    """

    shards: dict[str, tuple[Shape, Shape]]
    sizes: dict[str, int]
    calls: Counter[str]
    sent: Counter[str]


def dry_run(launch: Launch) -> DryRun:
    """Run a step of the launch: seconds for a small model, minutes for the largest.

    Raises `RuntimeError` if the process is already in a process group.
    """
    if distributed.is_initialized():
        raise RuntimeError("this process is already in a process group: start the dry run in a separate process")
    training = launch.training
    if training.ema_on_cpu:  # outside GPU memory
        training = replace(training, ema_decay=None)
    if type(training.precision) in (Auto, Fp16):  # independent of this processor; all 16-bit formats have one size
        training = replace(training, precision=Bf16())
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=launch.gpus)
    try:
        # Outside FakeTensorMode: the device mesh needs values.
        parallel = KINDS[launch.kind](launch.replicas) if launch.gpus > 1 else SingleProcess()
        with torch.random.fork_rng([]), FakeTensorMode(), _FakeValueTracker() as tracker:
            model: Any = launch.config.build()
            for name, core in model.attention_fns.items():
                if isinstance(core, SparseAttention):
                    model.attention_fns[name] = _GPUSparseAttention(core.pattern, core.prefix)
            full_shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
            run = TrainState(model, Autoregressive(), training, "cpu", parallel)
            for p in run.parameters:  # allocate moments, as after the first step
                p.grad = torch.zeros_like(p)
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            measure = MemoryHook(tracker, launch.retained_bytes)
            run.wrapped.register_forward_hook(measure.after_forward)
            rows, (h, w) = training.batch_size // launch.gpus, launch.config.grid
            batch = {"text": (rows, launch.config.text_len), "image": (rows, h * w)}
            update(run, {name: torch.zeros(shape, dtype=torch.int64) for name, shape in batch.items()}, [measure])
            return DryRun(
                shards={name: (full_shapes[name], tuple(to_local(p).shape)) for name, p in model.named_parameters()},
                sizes=measure.sizes,
                calls=tracker.calls,
                sent=tracker.sent,
            )
    finally:
        distributed.destroy_process_group()


class _FakeValueTracker(MemoryTracker):
    """Tracker that returns values for operations that fake tensors do not support (see the module docstring)."""

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], FakeTensor):
            if func is compat.local_scalar_dense:
                return 1
            if func is torch.ops.aten.nonzero.default:
                return torch.arange(args[0].numel())[:, None]
        return func(*args, **kwargs)


class _GPUSparseAttention(SparseAttention):
    """Sparse attention with the chunk size of a GPU."""

    def sequences_per_part(self, device: str) -> int:
        return super().sequences_per_part("cuda")


class MemoryHook(Hook):
    """Hook that measures memory after the first forward pass and after all backward passes of a step.

    Args:
        tracker: active during the step.
        gathered: bytes of weights that stay gathered between the passes.

    Attributes:
        sizes: bytes by the names of `Launch.sizes`: the state, activations that a forward pass leaves without these
            weights, and the peak of the passes.
    """

    def __init__(self, tracker: MemoryTracker, gathered: int) -> None:
        self._tracker, self._gathered = tracker, gathered

    def before_step(self, run: TrainState) -> None:
        self._tracker.reset()
        self._before, self._activations = self._tracker.current, 0

    def after_forward(self, *_: Any) -> None:
        self._activations = self._activations or self._tracker.refresh() - self._before - self._gathered

    def after_backward(self, run: TrainState) -> None:
        self.sizes = state_bytes(run)
        self.sizes |= {"activations of a micro-batch": self._activations, "peak": self._tracker.peak}


def state_bytes(run: TrainState) -> dict[str, int]:
    """Return the bytes of this process's weights, gradients, moments and averaged weights, each storage once."""
    moments = [v for o in run.optimizers for state in o.state.values() for v in state.values() if isinstance(v, Tensor)]
    sizes = {
        "weights": storage_bytes(run.parameters),
        "gradients": storage_bytes(p.grad for p in run.parameters if p.grad is not None),
        "moments": storage_bytes(v for v in moments if v.ndim),  # without step counts
    }
    return sizes | ({"averaged weights": storage_bytes(run.ema.parameters.values())} if run.ema else {})
