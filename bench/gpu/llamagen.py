"""Entry 2: drawing and training of a prior, limner and LlamaGen with equal sizes on the same device.

    python bench/gpu/llamagen.py --llamagen CHECKOUT

Both have random weights, the width, depth and heads of `xl`, 256 text and 1,024 image tokens, 8,192 image codes, bf16.
The results of a task are medians over rounds of a side's seconds, and of its ratio to `limner` in the same round: with
a ratio of 2 a side takes twice as long. A round measures all sides; a step's time is itself a median.

    limner, limner compiled        the paper's pattern, as `limner draw` and `limner bench --compiled` draw
    LlamaGen, LlamaGen compiled    `bench/peers.py`

Pictures that do not fit into memory together are drawn in halves, and the time is that of all of them. Training takes a
step of 32 pictures with limner's AdamW on both sides; limner also learns the text, LlamaGen gets its features.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import DEVICE, Results, free, parser

from limner.models.transformer import SIZES, TransformerConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers import LlamaGen
from prior import Limner

QUICK = TransformerConfig(text_vocab=256, image_vocab=64, text_len=8, grid=(4, 4), width=64, depth=2, heads=2)


def main() -> None:
    """Time drawing and training of each side in every round."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--llamagen", type=Path, help="checkout of FoundationVision/LlamaGen")
    options_parser.add_argument("--rounds", type=int, default=3)
    options = options_parser.parse_args()
    results, sides = Results("llamagen", options), make_sides(options)
    batch, *numbers = (2, 1, 4) if options.quick else (32, 1, 64, 16, 512)
    tasks: dict[str, Callable[[Any], dict[str, float]]] = {
        f"{n} drawn": lambda side, n=n: draw(side, n) for n in numbers
    }
    tasks["training"] = lambda side: {"seconds": side.training(batch), "batch": batch}
    # `limner compiled` is last because it compiles for the longest time. It trains as `limner` does.
    order = sorted(itertools.product(tasks, sides), key=lambda pair: pair[1] == "limner compiled")
    order = [pair for pair in order if pair != ("training", "limner compiled")]
    seconds: dict[str, list[dict[str, float]]] = {task: [] for task in tasks}
    for number in range(1 if options.quick else options.rounds):
        for times in seconds.values():
            times.append({})
        for task, name in order:
            time = results.measure(f"{task}, {name}, round {number}", lambda t=task, n=name: tasks[t](sides[n]))
            if "seconds" in time:
                seconds[task][-1][name] = time["seconds"]
            results.save(task, compare(seconds[task]))
    for task in tasks:
        print(task, results.values[task])


def make_sides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sides to time by name; limner's alone without a checkout of LlamaGen."""
    config = QUICK if options.quick else SIZES["xl"]
    sides: dict[str, Any] = {
        f"limner{suffix}": Limner(config, dense=False, device=DEVICE, compiled=bool(suffix))
        for suffix in ("",) + (" compiled",) * (not options.quick)
    }
    if options.llamagen is None:
        print("LlamaGen is skipped: give its checkout by --llamagen")
        return sides
    return sides | {
        f"LlamaGen{suffix}": LlamaGen(str(options.llamagen), config, DEVICE, compiled=bool(suffix))
        for suffix in ("", " compiled")
    }


def draw(side: Any, n: int) -> dict[str, float]:
    """Time n pictures, in as large batches as fit."""
    batch = n
    while True:
        try:
            time = side.drawing(batch)
        except torch.OutOfMemoryError:
            batch //= 2
            if not batch:
                raise
        else:
            pictures = {"seconds": time.seconds * n / batch, "pictures per second": batch / time.seconds}
            return {**pictures, "step": time.step, "batch": batch, "cache bytes": time.cache_bytes}
        free()


def compare(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return each side's median seconds over rounds, and the median of its ratios to `limner` within a round."""
    rounds = [times for times in rounds if "limner" in times]
    return {
        name: {
            "seconds": median(times[name] for times in rounds if name in times),
            "ratio": median(times[name] / times["limner"] for times in rounds if name in times),
        }
        for name in (rounds[0] if rounds else ())
    }


if __name__ == "__main__":
    main()
