"""Signal handlers that request a stop after the current step."""

import os
import signal
import threading
from types import FrameType
from typing import Self


class Signals:
    """Within the block the first SIGINT or SIGTERM sets `received`; a second of the same kind raises
    `KeyboardInterrupt`.

    On Ctrl-C the terminal sends SIGINT to all processes that `torchrun` has started, and `torchrun` sends them SIGTERM.
    `torchrun` kills processes that still run after 30 s, or after its --shutdown-timeout (torch 2.12).
    """

    received = False

    def __enter__(self) -> Self:
        self._previous = {}
        self._received_signals: set[int] = set()
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._received_signals:
            raise KeyboardInterrupt
        self._received_signals.add(number)
        if self.received:
            return
        self.received = True
        # `print` is unsafe within a signal handler.
        os.write(2, b"\nfinishing and saving this step; press Ctrl-C again to stop now\n")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
