"""Hooks called during a run."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from limner.training.train_state import TrainState


class Hook:
    """Base class of hooks, whose methods do nothing. Subclasses override the methods they need.

    `name`, unique in a run, is the key of the hook's state in checkpoints. Without it the hook keeps its initial state.
    `saved` names the attributes that are its state: tensors and JSON values. `done`, the same on all processes, ends
    the run after the step in which it becomes True.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def done(self) -> bool:
        return False

    def before_training(self, run: TrainState) -> None:
        """Called once before the first step, after a checkpoint is restored."""

    def before_step(self, run: TrainState) -> None:
        """Called before the forward pass; `run.step` counts the updates done."""

    def after_backward(self, run: TrainState) -> None:
        """Called after the gradients of the whole batch are averaged, before their norm is computed. Gradients that
        `Reduction.parts` decompresses are None here, or NaN if they are not finite."""

    def before_update(self, run: TrainState) -> None:
        """Called with clipped gradients before the optimizer step, once for each part of the parameters
        (`Reduction.parts`). Gradients of other parts are None. Not called if the update is skipped."""

    def after_update(self, run: TrainState) -> None:
        """Called after `run.step` increases; the update was skipped if `run.loss` or `run.norm` is not finite."""

    def before_log(self, run: TrainState, row: dict[str, Any]) -> None:
        """Called before a row of metrics is logged, and before an evaluation. May add entries to `row`."""

    def after_eval(self, run: TrainState, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation."""

    def before_save(self, run: TrainState) -> None:
        """Called before the states for a checkpoint are collected."""

    def close(self) -> None:
        """Called when training ends, also on error. Remove hooks installed on the model."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint by name: tensors and JSON values."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; tensors are on the CPU. Values keep their type."""
        for name in self.saved:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value.copy_(state[name])
            else:
                setattr(self, name, type(value)(state[name]))
