"""The module whose forward pass created a node of the autograd graph."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from limner import compat


class ModuleTrace:
    """Context manager that assigns nodes of the autograd graph to the modules of a model.

    Autograd numbers the nodes that a thread creates. Forward hooks note the next number when a module's `forward`
    begins and ends, so the innermost module that ran at a number is the node's, without tracing or changed modules.

    Attributes:
        current: dotted name of the innermost running module; "" outside of the model's children. A module that several
            modules call, such as an attention function, counts as a child of its caller.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.current = model, ""
        self._running = [""]
        self._starts, self._names = [0], [""]
        self._stack = ExitStack()

    def __enter__(self) -> ModuleTrace:
        for name, module in self.model.named_modules():
            if name:

                def enter(*_: Any, name: str = name) -> None:
                    inside = not self.current or name.startswith(f"{self.current}.")
                    self._running.append(name if inside else f"{self.current}.{name.rpartition('.')[2]}")
                    self._change()

                def leave(*_: Any) -> None:
                    self._running.pop()
                    self._change()

                for handle in (
                    module.register_forward_pre_hook(enter, prepend=True),
                    module.register_forward_hook(leave, always_call=True),
                ):
                    self._stack.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _change(self) -> None:
        self.current = self._running[-1]
        self._starts.append(compat.next_sequence_nr())
        self._names.append(self.current)

    def module_of(self, node: Any) -> str:
        """Return the name of the module whose forward pass created a node, as `current`. No forward pass creates the
        nodes that accumulate gradients."""
        return self._names[bisect_right(self._starts, compat.sequence_nr(node)) - 1]
