"""Requests that share an engine: pictures per second, and the price of positions that differ.

    python bench/requests.py --clients 16 --rounds 5

Prints a JSON line for each model with the medians of the rounds: seconds of N requests of one candidate, first in
order, then submitted together, then submitted before successive steps; and the ratios. Other processes must not run
meanwhile.
"""

import argparse
import json
import statistics
import time

import limner
from limner.numerics.precision import Fp32
from limner.pipeline import TextToImage

CAPTIONS = {
    "scenes": ["a small red circle", "a blue square above a green triangle", "two large yellow stars"],
    "icons": ["a hamburger, flat", "a red heart, line drawing", "a cat, 3d"],
}


def submit(pipe: TextToImage, name: str, i: int):
    """Submit the i-th request."""
    caption = CAPTIONS[name][i % len(CAPTIONS[name])]
    return pipe.engine.submit(pipe.request(caption, 1, sampler=pipe.defaults.sampler, seed=i))


def in_order(pipe: TextToImage, name: str, clients: int) -> float:
    """Return the seconds of all requests, each after the one before."""
    begin = time.perf_counter()
    for i in range(clients):
        pipe.engine.run([submit(pipe, name, i)])
    return time.perf_counter() - begin


def at_once(pipe: TextToImage, name: str, clients: int) -> float:
    """Return the seconds of all requests, submitted together."""
    begin = time.perf_counter()
    pipe.engine.run([submit(pipe, name, i) for i in range(clients)])
    return time.perf_counter() - begin


def staggered(pipe: TextToImage, name: str, clients: int) -> float:
    """Return the seconds of all requests, of which one joins before each step."""
    begin, jobs = time.perf_counter(), []
    for i in range(clients):
        jobs.append(submit(pipe, name, i))
        pipe.engine.step()
    pipe.engine.run(jobs)
    return time.perf_counter() - begin


def main() -> None:
    """Print a line for each bundled model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name in CAPTIONS:
        pipe = limner.load(name, precision=Fp32())
        ways = {"in order": in_order, "at once": at_once, "staggered": staggered}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds + 1):
            for way, draw in ways.items():
                seconds[way].append(draw(pipe, name, options.clients))
        medians = {way: statistics.median(values[1:]) for way, values in seconds.items()}  # without the first round
        ranges = {way: [min(values[1:]), max(values[1:])] for way, values in seconds.items()}
        faster = {way: medians["in order"] / medians[way] for way in ("at once", "staggered")}
        print(json.dumps({"model": name, "clients": options.clients, **medians, "ranges": ranges, "faster by": faster}))


if __name__ == "__main__":
    main()
