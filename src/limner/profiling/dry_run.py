"""A launch tried in one process: as the first of its ranks, on tensors that have shapes and no values.

The process joins a `fake` group as large as the launch: its collectives return at once. Under `FakeTensorMode` nothing
is stored or computed, and every operation is called as on a cluster: the loop's own `Run` and `update` build, convert,
shard and train the model for a step, with the optimiser, clipping and averages of the recipe. `Watcher` counts what
that takes. So a launch of a thousand GPUs fails here where it would fail there, if its shapes or settings are wrong.

Two things a step asks of values. Numbers that the host reads (a loss, a count of steps) are 1. Captions have no
padding, so that every position is a target, which takes the most.

PowerSGD is not tried: the trial reduces gradients uncompressed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from limner.distributed.sharded import KINDS
from limner.layers.sparse import SparseAttention
from limner.numerics.precision import Auto, Bf16, Fp16
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import to_local
from limner.profiling.launch import Launch
from limner.profiling.memory_tracker import Watcher, storage_bytes
from limner.training.hooks import Hook
from limner.training.step import update
from limner.training.train_state import Run

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the first rank of a launch had and did in a step. Bytes.

    Args:
        shards: whole shape and shape of the rank's shard, by name.
        state: weights, gradients, moments, averaged weights.
        activations: kept by a forward pass, beyond gathered weights.
        peak: most bytes alive in the step.
        calls, sent: of collectives, as `Watcher` counts them.
    """

    shards: dict[str, tuple[Shape, Shape]]
    state: dict[str, int]
    activations: int
    peak: int
    calls: Counter[str]
    sent: Counter[str]


def try_out(launch: Launch) -> Trial:
    """Run a step of the launch. Takes seconds for a small model and minutes for the largest.

    Raises `RuntimeError` if the process is in a process group already.
    """
    if distributed.is_initialized():
        raise RuntimeError("a launch is tried in a process of its own: this one is in a process group")
    training = launch.training
    if training.ema_on_cpu:  # which takes no memory of a GPU
        training = replace(training, ema_decay=None)
    if type(training.precision) in (Auto, Fp16):  # this processor does not matter, and 16 bits are 16 bits
        training = replace(training, precision=Bf16())
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=launch.gpus)
    try:
        parallel = KINDS[launch.kind](launch.replicas)  # its mesh of ranks has values
        with torch.random.fork_rng([]), FakeTensorMode(), _Answers() as watch:
            model: Any = launch.config.build()
            for name, core in model.cores.items():
                if isinstance(core, SparseAttention):
                    model.cores[name] = _OnGPU(core.pattern, core.prefix)
            wholes = {name: tuple(p.shape) for name, p in model.named_parameters()}
            run = Run(model, Autoregressive(), training, "cpu", parallel)
            for p in run.parameters:  # the first step's optimiser makes its moments, which later steps begin with
                p.grad = torch.zeros_like(p)
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            measure = Measure(watch, launch.held)
            run.compute.register_forward_hook(measure.after_forward)
            rows, (h, w) = launch.samples * training.accumulate, launch.config.grid
            batch = {"text": (rows, launch.config.text_len), "image": (rows, h * w)}
            update(run, {name: torch.zeros(shape, dtype=torch.int64) for name, shape in batch.items()}, [measure])
            return Trial(
                shards={name: (wholes[name], tuple(to_local(p).shape)) for name, p in model.named_parameters()},
                state=measure.state,
                activations=measure.activations,
                peak=watch.peak,
                calls=Counter(watch.calls),
                sent=Counter(watch.sent),
            )
    finally:
        distributed.destroy_process_group()


class _Answers(Watcher):
    """Also answers what a fake tensor cannot: see the module."""

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], FakeTensor):
            if func is torch.ops.aten._local_scalar_dense.default:
                return 1
            if func is torch.ops.aten.nonzero.default:
                return torch.arange(args[0].numel())[:, None]
        return func(*args, **kwargs)


class _OnGPU(SparseAttention):
    """Takes as many sequences at once as on a GPU."""

    @property
    def at_once(self) -> int:
        return self.at_once_on("cuda")


class Measure(Hook):
    """Reads memory after the first forward pass and after all backward passes of a step.

    Args:
        watch: within whose block the step runs.
        gathered: bytes of weights that stay gathered between the passes.

    Attributes:
        activations: bytes that the forward pass leaves.
        state: as `state_bytes` has it.
    """

    def __init__(self, watch: Watcher, gathered: int) -> None:
        self._watch, self._gathered = watch, gathered
        self.state: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Before the step that is measured."""
        self._watch.restart()
        self._begun, self.activations = self._watch.now, 0

    def after_forward(self, *_: Any) -> None:
        """What is new, but for the weights that stay gathered."""
        if not self.activations:
            self.activations = self._watch.read() - self._begun - self._gathered

    def after_backward(self, run: Run) -> None:
        self.state = state_bytes(run)


def state_bytes(run: Run) -> dict[str, int]:
    """Bytes of this process's weights, gradients, moments and averaged weights, each storage counted once."""
    moments = [v for o in run.optimizers for kept in o.state.values() for v in kept.values() if isinstance(v, Tensor)]
    found = {
        "weights": storage_bytes(run.parameters),
        "gradients": storage_bytes(p.grad for p in run.parameters if p.grad is not None),
        "moments": storage_bytes(v for v in moments if v.ndim),  # not the counts of steps
    }
    return found | ({"averaged weights": storage_bytes(run.ema.parameters.values())} if run.ema else {})
