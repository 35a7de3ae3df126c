"""Processes of `limner serve` and `limner vote`, and plain HTTP to them."""

import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import openai

ROOT = Path(__file__).parents[1]


class Server:
    """A process of limner that serves HTTP."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "limner", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if "running on http" in line:
                self.port = int(line.split("http://127.0.0.1:")[1].split()[0])
                break
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def client(self, **options):
        return openai.OpenAI(
            **{"base_url": f"http://127.0.0.1:{self.port}/v1", "api_key": "none", "max_retries": 0, **options}
        )

    def send(self, method: str, path: str, body: bytes | str | None = None, **headers: str):
        """Return status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, {"content-type": "application/json", **given})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def open_requests(self) -> int:
        lines = self.send("GET", "/metrics")[2].decode().splitlines()
        return int(float(next(line for line in lines if line.startswith("limner_open_requests")).split()[1]))


def serve(folder: Path, *options: str) -> AbstractContextManager[Server]:
    """Run `limner serve` with a model."""
    return running("serve", "--model", str(folder), "--port", "0", *options)


@contextmanager
def running(*arguments: str) -> Iterator[Server]:
    """Run a command that serves HTTP until the block ends."""
    server = Server(*arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
