"""Time of the tokens of one picture: limner's parallel and sequential sampling, and LlamaGen at equal sizes.

    python bench/pictures.py --llamagen CHECKOUT --rounds 10
    python bench/pictures.py --models random --candidates 1

A model is a bundled one, or `random`: the sizes of `prior.py` with random weights, where few guesses are right.
LlamaGen has the same width, depth, heads, text and image tokens, and random weights, on which its time does not depend;
the time of its picture is that of its prefill and of as many steps as tokens, timed at several positions. The sides
alternate. Prints JSON: medians and ranges of seconds, passes of the parallel sampling, and the ratios to the parallel
sampling within each round. Other processes must not run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from math import prod
from typing import Any

import torch

import limner.pipeline
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Auto
from limner.quantization.inference_linear import pack_linears
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generation_config import Sampler
from limner.sampling.parallel import generate

CAPTIONS = {
    "scenes": "a small red circle above a large blue square on a gray background",
    "icons": "a tiger, line drawing",
    "glyphs": "a rocket, phosphor thin",
}
RANDOM = TransformerConfig(
    text_vocab=16_384, image_vocab=8_192, text_len=256, grid=(32, 32), width=512, depth=8, heads=8
)


class CountedDecoder(TokenDecoder):
    """Counts the steps."""

    def __init__(self, decoder: TokenDecoder, max_window: int) -> None:
        super().__init__(decoder.model, decoder.store)
        self.max_window, self.steps = max_window, 0

    def step(self, *arguments: Any) -> torch.Tensor:
        self.steps += 1
        return super().step(*arguments)


def sampling(decoder: TokenDecoder, text: torch.Tensor, sampler: Sampler, candidates: int, window: int) -> Any:
    """Return a function from a seed to the seconds and the steps of the tokens of one caption."""
    counted = CountedDecoder(decoder, window)

    @torch.inference_mode()
    def draw(seed: int) -> tuple[float, int]:
        counted.steps, begin = 0, time.perf_counter()
        generate(counted, text, range(candidates), sampler, seed=seed)
        return time.perf_counter() - begin, counted.steps

    return draw


def sides_of(model: str, candidates: int) -> tuple[TransformerConfig, dict[str, Callable[[int], tuple[float, int]]]]:
    """Return the sizes of a model, and the two samplings."""
    if model == "random":
        torch.manual_seed(0)
        decoder = TokenDecoder(pack_linears(RANDOM.build().to(Auto().dtype(torch.device("cpu"))).eval()))
        text, sampler = torch.randint(0, RANDOM.text_vocab, (1, RANDOM.text_len)), Sampler()
    else:
        pipe = limner.pipeline.load(model)
        decoder, sampler = pipe.engine.models.decoder, Sampler().with_defaults(pipe.defaults.sampler)
        text = pipe.tokenizer.encode([CAPTIONS[model]], decoder.config.text_len)
        if decoder.config.condition_blocks:
            text = torch.cat([text, torch.full((1, prod(decoder.config.grid)), -1)], 1)  # no picture to follow
    windows = {"parallel": decoder.max_window, "sequential": 1}
    return decoder.config, {
        side: sampling(decoder, text, sampler, candidates, window) for side, window in windows.items()
    }


def llamagen(path: str, config: TransformerConfig, candidates: int) -> Callable[[], float]:
    """Return a function that times LlamaGen in a worker process."""
    sizes = {name: getattr(config, name) for name in ("image_vocab", "text_len", "grid", "width", "depth", "heads")}
    command = [sys.executable, __file__, "--llamagen", path, "--worker", json.dumps(sizes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def draw() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        print(candidates, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    return draw


def work(path: str, sizes: str) -> None:
    """Time LlamaGen for each number of candidates on stdin."""
    from peers import LlamaGen

    read = json.loads(sizes)
    peer = LlamaGen(path, TransformerConfig(**{**read, "grid": tuple(read["grid"]), "text_vocab": 8}))
    for line in sys.stdin:
        print(peer.drawing(int(line)).seconds, flush=True)


def main() -> None:
    """Time all sides in rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamagen", help="a checkout of FoundationVision/LlamaGen")
    parser.add_argument("--models", nargs="+", default=[*CAPTIONS, "random"])
    parser.add_argument("--candidates", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.llamagen, options.worker)
        return
    for model in options.models:
        config, sides = sides_of(model, options.candidates)
        peer = llamagen(options.llamagen, config, options.candidates) if options.llamagen else None
        seconds: dict[str, list[float]] = {side: [] for side in sides} | ({"llamagen": []} if peer else {})
        steps = []
        for seed in range(1_000, 1_001 + options.rounds):  # the first round warms up
            for side, draw in sides.items():
                elapsed, count = draw(seed)
                seconds[side].append(elapsed)
                steps += [count] if side == "parallel" else []
            if peer:
                seconds["llamagen"].append(peer())
        seconds = {side: values[1:] for side, values in seconds.items()}
        rows = {
            side: {
                "median": statistics.median(values), "range": [min(values), max(values)],
                "ratio": statistics.median(a / b for a, b in zip(values, seconds["parallel"], strict=True)),
            }
            for side, values in seconds.items()
        }  # fmt: skip
        print(json.dumps({"model": model, "tokens": prod(config.grid), "steps": statistics.median(steps[1:]), **rows}))


if __name__ == "__main__":
    main()
