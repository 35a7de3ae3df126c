"""Module and operation of the first value in a step that is not finite.

`update` skips a step whose loss or gradient is not finite, and thus keeps its weights. `NonfiniteReport` repeats such a
step, with its batch and its random numbers, under a mode that sees all operations of both passes. It stops training
with the first operation whose result is less finite than its inputs: infinite from finite values, or NaN without one.
Masks of -inf and their sums are inputs, so attention passes. Other steps cost a reference to the batch. torch's anomaly
detection reads each gradient of each step, and finds NaN in the backward pass alone.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from limner import compat
from limner.autograd.module_trace import ModuleTrace
from limner.compat import TorchDispatchMode
from limner.training.hooks import Hook
from limner.training.train_state import Diverged, TrainState


class NonfiniteReport(Hook):
    """Raises `Diverged` after the first update whose loss or gradient is not finite, and names the cause.

    With gradient scaling only the loss counts: scales are adjusted until gradients overflow.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Any, ...]] = []
        self._handles = ExitStack()

    def before_step(self, run: TrainState) -> None:
        self._handles.close()
        self._calls.clear()
        record = run.trainable.register_forward_pre_hook(lambda _, args: self._calls.append(args))
        self._handles.callback(record.remove)
        self._random = torch.get_rng_state(), run.generator.get_state()

    def after_update(self, run: TrainState) -> None:
        if math.isfinite(run.loss) and (run.config.scaling != "none" or math.isfinite(run.norm)):
            return
        self._handles.close()
        cause = next((f"parameter {n} is" for n, p in run.model.named_parameters() if _level([p])), None)
        raise Diverged(f"step {run.step}: {cause or self._repeat(run) or 'the sum over micro-batches is'} not finite")

    def close(self) -> None:
        self._handles.close()

    def _repeat(self, run: TrainState) -> str | None:
        """Repeat the step; return its first operation with a result that is not finite."""
        torch.set_rng_state(self._random[0])
        run.generator.set_state(self._random[1])
        with ModuleTrace(run.model) as trace, _FirstNonfinite(trace) as first:
            for call in self._calls:
                with run.config.precision.autocast(run.device):
                    loss, _ = run.trainable(*call)
                loss.backward()
        return first.cause


class _FirstNonfinite(TorchDispatchMode):
    """Names the first operation whose result is less finite than its inputs, as the subject of a sentence."""

    def __init__(self, trace: ModuleTrace) -> None:
        super().__init__()
        self.cause: str | None = None
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _level(compat.tree_leaves((args, kwargs)))  # before an operation in place
        result = func(*args, **(kwargs or {}))
        if self.cause is None and "empty" not in func.name() and _level(compat.tree_leaves(result)) > before:
            node = compat.current_autograd_node()
            module = (self._trace.module_of(node) if node else self._trace.current) or "the objective"
            where = f"{node.name()}, the backward pass of {module}," if node else f"the forward pass of {module}"
            self.cause = f"the result of {func.name()} in {where} is"
        return result


def _level(values: Iterable[Any]) -> int:
    """Return 2 if a value is NaN, else 1 if one is infinite, else 0; of tensors and numbers."""
    level = 0
    for x in values:
        if isinstance(x, Tensor) and x.is_floating_point():
            level = max(level, 2 * bool(x.isnan().any()) or int(x.isinf().any()))
        elif isinstance(x, float):
            level = max(level, 2 * math.isnan(x) or int(math.isinf(x)))
    return level
