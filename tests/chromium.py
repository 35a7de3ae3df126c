"""Chromium that reaches this machine only, driven without a package, by the DevTools protocol over pipes."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--proxy-server=127.0.0.1:1"]


class Page:
    """A tab. `events` are the messages of the browser so far."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, os.fdopen(answers, "rb")
        self._id, self._buffer, self._session = 0, b"", {}
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = self._answers.read1(1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression, or of the promise that it is."""
        done = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression: str, seconds: float = 120) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, expression
            time.sleep(0.1)
        return value

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key: Enter, Tab, or a digit."""
        code = {"Enter": 13, "Tab": 9}.get(key) or ord(key)
        for kind in ("keyDown", "keyUp"):
            pressed = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self("Input.dispatchKeyEvent", **pressed, **({"text": text} if text and kind == "keyDown" else {}))


@contextmanager
def open_page(address: Path | str, profile: Path) -> Iterator[Page]:
    """Open a file or an address of this machine in a browser, whose user data is in `profile`, until the block ends."""
    assert CHROMIUM
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    redirect = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # the descriptors that Chromium takes
    shell = ["bash", "-c", redirect, "bash", *command]
    with subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            page = Page(ours_out, ours_in)
            speed = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
            page("Network.emulateNetworkConditions", offline=isinstance(address, Path), **speed)
            page("Page.navigate", url=address.as_uri() if isinstance(address, Path) else address)
            page.wait("document.readyState === 'complete'")
            yield page
        finally:
            process.terminate()
            os.close(ours_out)
