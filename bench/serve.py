"""Clients of `limner serve`: pictures per second, processor time of a picture, waits and memory.

    python bench/serve.py --clients 1 16 100 --pictures 400 --rounds 3
    python bench/serve.py --clients 8 --minutes 20 --pause 1 --rounds 0
    python bench/serve.py --clients 100 --rounds 0 --kills 5

A client asks for one picture of one candidate, waits for its file, pauses, and asks again. A round draws a number of
pictures. Rounds alternate between the numbers of clients and the same captions drawn by one call of `draw_many` in
another process, which also encodes PNG files. `--minutes` adds a soak of the last number of clients. `--kills` kills
a server (SIGKILL) that has answered half of its clients, and starts it again. Prints JSON: medians and ranges of the
rounds, ratios, the memory of the server in MiB by seconds, answers of killed servers. The clients run on the same
cores. The processor time is that of the server and of the offline process alone, and depends less on other work on
the machine than pictures per second do.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

ATTRIBUTES = (
    ("small", "large"),
    ("red", "blue", "green", "yellow", "purple", "orange"),
    ("circle", "square", "triangle", "star", "cross"),
    ("gray", "white", "teal", "black"),
)
CAPTIONS = [f"a {a} {b} {c} on a {d} background" for a, b, c, d in itertools.product(*ATTRIBUTES)]
random.Random(0).shuffle(CAPTIONS)
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Process:
    """A process and what /proc knows of it."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *arguments], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        stdin, stdout, stderr = self.popen.stdin, self.popen.stdout, self.popen.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    def cpu_seconds(self) -> float:
        """Return the processor time of all threads."""
        words = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS

    def memory(self) -> float:
        """Return the resident memory in MiB."""
        return int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1]) * PAGE / 2**20

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()


class Server(Process):
    """`limner serve` on a free port."""

    def __init__(self, model: str, max_requests: int) -> None:
        options = ["--model", model, "--port", "0", "--max-requests", str(max_requests)]
        super().__init__("-m", "limner", "serve", *options)
        line = next(line for line in self.stderr if "running on http" in line)
        self.port = int(line.split("http://127.0.0.1:")[1].split()[0])
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_log(self) -> None:
        for _ in self.stderr:
            pass


class Offline(Process):
    """This script with --offline: draws a number of captions for each line that it reads."""

    def __init__(self, model: str) -> None:
        super().__init__(__file__, "--offline", model)

    def draw(self, count: int) -> None:
        """Draw captions, and wait for them."""
        print(count, file=self.stdin, flush=True)
        self.stdout.readline()


def draw_offline(model: str) -> None:
    """Draw as many captions as a line of the input says, and print a line."""
    import limner

    pipe = limner.load(model)
    for line in sys.stdin:
        captions = list(itertools.islice(itertools.cycle(CAPTIONS), int(line)))
        for drawings in pipe.draw_many(captions, candidates=1, seed=range(len(captions))):
            drawings[0].png()
        print(flush=True)


@dataclass
class Round:
    """Pictures of one round."""

    seconds: float
    cpu_seconds: float
    pictures: int
    waits: dict[int, list[float]] = field(default_factory=dict)  # in seconds, by client


def offline_round(process: Offline, pictures: int) -> Round:
    """Draw captions in one call."""
    begin, cpu = time.monotonic(), process.cpu_seconds()
    process.draw(pictures)
    return Round(time.monotonic() - begin, process.cpu_seconds() - cpu, pictures)


def draw(connection: http.client.HTTPConnection, caption: str, seed: int) -> tuple[int, bytes]:
    """Ask for one picture of one candidate. Return status and body of the answer."""
    body = {"prompt": caption, "candidates": 1, "seed": seed}
    connection.request("POST", "/v1/images/generations", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def client_round(server: Server, clients: int, pause: float, captions: int, pictures: float, seconds: float) -> Round:
    """Let clients ask for a number of pictures, or for some seconds."""
    begin, cpu, numbers = time.monotonic(), server.cpu_seconds(), itertools.count()
    waits: dict[int, list[float]] = {i: [] for i in range(clients)}
    failures: list[str] = []

    def client(i: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        while (number := next(numbers)) < pictures and time.monotonic() < begin + seconds:
            sent = time.monotonic()
            status, content = draw(connection, CAPTIONS[number % captions], number)
            if status != 200:
                failures.append(content.decode()[:300])
                return
            waits[i].append(time.monotonic() - sent)
            if pause:
                connection.close()  # the server would, after some seconds; the next request opens it again
                time.sleep(random.expovariate(1 / pause))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"{len(failures)} clients got an error: {failures[0]}")
    return Round(time.monotonic() - begin, server.cpu_seconds() - cpu, sum(map(len, waits.values())), waits)


def kill_round(model: str, clients: int) -> dict[str, float]:
    """Kill a server that has answered half of its clients. Return the number of each kind of answer, and the seconds
    that another server takes until it is ready."""
    answers: list[str] = []

    def ask(seed: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        try:
            _, content = draw(connection, CAPTIONS[seed % len(CAPTIONS)], seed)
        except (OSError, http.client.HTTPException):
            answers.append("connection lost")
            return
        try:
            Image.open(io.BytesIO(base64.b64decode(json.loads(content)["data"][0]["b64_json"]))).load()
            answers.append("whole picture")
        except (ValueError, KeyError, OSError):
            answers.append("torn")

    server = Server(model, 2 * clients)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    while len(answers) < clients // 2:
        time.sleep(0.001)
    server.close()
    for thread in threads:
        thread.join()
    begin = time.monotonic()
    again = Server(model, 2 * clients)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", again.port, timeout=60)
        connection.request("GET", "/ready")
        ready = connection.getresponse().status == 200
        seconds = time.monotonic() - begin if ready else math.nan
    finally:
        again.close()
    kinds = {kind: answers.count(kind) for kind in ("whole picture", "connection lost", "torn")}
    return {**kinds, "seconds to ready": round(seconds, 2)}


def summary(rounds: list[Round]) -> dict[str, object]:
    """Return medians with ranges, and the waits of all rounds."""

    def spread(values: list[float]) -> list[float]:
        return [round(x, 4) for x in (statistics.median(values), min(values), max(values))]

    result: dict[str, object] = {
        "pictures per second": spread([r.pictures / r.seconds for r in rounds]),
        "processor seconds per picture": spread([r.cpu_seconds / r.pictures for r in rounds]),
    }
    waits = sorted(wait for r in rounds for one in r.waits.values() for wait in one)
    if waits:
        means = [[statistics.fmean(one) for one in r.waits.values() if one] for r in rounds]
        result |= {
            "wait, median": round(statistics.median(waits), 3),
            "wait, 99%": round(waits[len(waits) * 99 // 100], 3),
            "mean wait of the slowest client / mean": spread([max(m) / statistics.fmean(m) for m in means]),
        }  # fmt: skip
    return result


def ratios(rounds: dict[str, list[Round]], names: tuple[str, str]) -> dict[str, list[float]]:
    """Return the ratios of rates and of processor times, by round."""
    pairs = list(zip(*(rounds[name] for name in names), strict=True))
    rate = [a.pictures / a.seconds / (b.pictures / b.seconds) for a, b in pairs]
    cpu = [b.cpu_seconds / b.pictures / (a.cpu_seconds / a.pictures) for a, b in pairs]
    return {"rates": [round(x, 3) for x in rate], "processor time": [round(x, 3) for x in cpu]}


def start_sampling(server: Server) -> list[tuple[float, float]]:
    """Return a list that a thread extends by seconds and MiB every second."""
    samples: list[tuple[float, float]] = []
    begin = time.monotonic()

    def sample() -> None:
        while server.popen.poll() is None:
            samples.append((round(time.monotonic() - begin, 1), round(server.memory(), 1)))
            time.sleep(1)

    threading.Thread(target=sample, daemon=True).start()
    return samples


def growth(samples: list[tuple[float, float]]) -> float:
    """Return the slope of the last two thirds of the samples by least squares, in MiB per minute."""
    x, y = zip(*samples[len(samples) // 3 :], strict=True)
    return statistics.linear_regression(x, y).slope * 60


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 100])
    parser.add_argument("--pictures", type=int, default=400, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0, help="of a soak")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0, help="mean seconds between two requests of a client")
    parser.add_argument("--captions", type=int, default=len(CAPTIONS), help="different ones")
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offline:
        draw_offline(options.offline)
        return
    server = Server(options.model, 2 * max(options.clients))
    result: dict[str, object] = {"options": vars(options)}
    arguments = options.pause, min(options.captions, len(CAPTIONS))
    try:
        client_round(server, max(options.clients), *arguments, max(options.clients), math.inf)  # warms up
        if options.rounds:
            result |= measure(server, options, arguments)
        if options.minutes:
            samples = start_sampling(server)
            soak = client_round(server, options.clients[-1], *arguments, math.inf, options.minutes * 60)
            result["soak"] = {
                **summary([soak]), "growth, MiB per minute": round(growth(samples), 3),
                "memory": samples[:: max(1, len(samples) // 40)],
            }  # fmt: skip
    finally:
        server.close()
    result["kills"] = [kill_round(options.model, options.clients[-1]) for _ in range(options.kills)]
    print(json.dumps(result, indent=1))


def measure(server: Server, options: argparse.Namespace, arguments: tuple[float, int]) -> dict[str, object]:
    """Return summaries of rounds of clients, and of captions drawn offline."""
    process = Offline(options.model)
    rounds: dict[str, list[Round]] = {}
    try:
        process.draw(16)
        for _ in range(options.rounds):
            for clients in options.clients:
                name = f"{clients} clients"
                done = client_round(server, clients, *arguments, options.pictures, math.inf)
                rounds.setdefault(name, []).append(done)
                print(name, summary([done]), file=sys.stderr)
            rounds.setdefault("offline", []).append(offline_round(process, options.pictures))
            print("offline", summary(rounds["offline"][-1:]), file=sys.stderr)
    finally:
        process.close()
    names = [(f"{n} clients", other) for n in options.clients for other in (f"{options.clients[0]} clients", "offline")]
    compared = {f"{a} / {b}": ratios(rounds, (a, b)) for a, b in names if a != b}
    return {"rounds": {name: summary(values) for name, values in rounds.items()}, "ratios": compared}


if __name__ == "__main__":
    main()
