"""Hooks: what a run does beyond its training steps."""

from collections.abc import Mapping
from typing import Any

from limner.training.train_state import Run


class Hook:
    """Does nothing; override what is needed. Every method is given the run.

    `name` tells the hooks of a run apart; a checkpoint holds their states under it. A hook that a checkpoint does not
    know begins anew.
    """

    @property
    def name(self) -> str:
        return type(self).__name__

    def before_step(self, run: Run) -> None:
        """Before anything is computed; `run.step` counts the updates done."""

    def after_backward(self, run: Run) -> None:
        """The gradients of the whole batch are there, not yet measured or clipped."""

    def before_update(self, run: Run) -> None:
        """The gradients are those that the optimisers get, clipped. Left out if the update is skipped."""

    def after_update(self, run: Run) -> None:
        """`run.step` counts the update, which was skipped if `run.loss` or `run.norm` is not finite."""

    def on_report(self, run: Run, row: dict[str, Any]) -> None:
        """Before a row of metrics is logged, to which it may add."""

    def on_eval(self, run: Run, metrics: Mapping[str, float]) -> None:
        """After each evaluation."""

    def on_save(self, run: Run) -> None:
        """Before the states for a checkpoint are taken."""

    def close(self) -> None:
        """When training ends, or fails: take from the model what was put there."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, by name: tensors, which are stored as such, and JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; tensors are on the CPU."""
