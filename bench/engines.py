"""Time of `limner draw`, shell to file, with ONNX Runtime and with torch, and equality of their drawings.

    python bench/engines.py --rounds 10
    python bench/engines.py --rounds 0 --equal 64

Processes alternate; prints medians, ranges and ratios in seconds. `--equal N` draws N captions with 16 candidates by
both engines in fp32 in this process, with seeds from 2,000 on, and counts rows whose tokens differ. Other processes
must not run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

CAPTIONS = {
    "scenes": "a small red circle above a large blue square on a gray background",
    "icons": "a tiger, line drawing",
}


def draw(folder: str, model: str, candidates: int, engine: str) -> float:
    """Return the seconds of one process of `limner draw`."""
    out = str(Path(folder) / "drawing.png")
    command = [sys.executable, "-m", "limner", "draw", CAPTIONS[model], "--model", model, "--engine", engine]
    begin = time.perf_counter()
    subprocess.run([*command, "--candidates", str(candidates), "-o", out], check=True, capture_output=True)
    return time.perf_counter() - begin


def times(rounds: int) -> None:
    """Print the times of both models and engines, with 1 and 16 candidates."""
    with TemporaryDirectory() as folder:
        for model in CAPTIONS:
            for candidates in (1, 16):
                seconds: dict[str, list[float]] = {"onnx": [], "torch": []}
                for i in range(rounds + 1):
                    for engine in sorted(seconds, reverse=bool(i % 2)):
                        seconds[engine].append(draw(folder, model, candidates, engine))
                measured = {engine: values[1:] for engine, values in seconds.items()}  # without the first round
                medians = {engine: statistics.median(values) for engine, values in measured.items()}
                row = {"model": model, "candidates": candidates, "medians": medians, "all": measured}
                print(json.dumps({**row, "ratio": medians["torch"] / medians["onnx"]}), flush=True)


def equality(count: int) -> None:
    """Print how many candidates of random captions have equal tokens with both engines.

    A row counts one flip, its first token that differs, since what follows depends on it.
    """
    from limner.export.compare import random_captions
    from limner.numerics.precision import Fp32
    from limner.pipeline import load
    from limner.runtime.pipeline import OnnxPipeline

    for model in CAPTIONS:
        torch_pipe, onnx = load(model, precision=Fp32()), OnnxPipeline(model)
        equal = tokens = 0
        for seed, caption in enumerate(random_captions(torch_pipe, count), 2_000):
            expected = torch_pipe.candidates([caption], 16, seed=seed).tokens[0].numpy()
            drawn = onnx.candidates(caption, 16, seed, onnx.defaults.sampler)[2]
            equal += int((drawn == expected).all(1).sum())
            tokens += drawn.size
        print(json.dumps({"model": model, "rows": 16 * count, "flips": 16 * count - equal, "tokens": tokens}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--equal", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.rounds:
        times(arguments.rounds)
    if arguments.equal:
        equality(arguments.equal)
