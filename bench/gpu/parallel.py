"""Entry 7: parallel sampling of the bundled models, and a pool of rows at different positions.

python bench/gpu/parallel.py

drawing    tokens of 1, 16 and 64 candidates of a caption of each model, without pixels and ranking: one by one in a
           CUDA graph, as `limner draw` does on a GPU; one by one without a graph; and in parallel without one, which
           reads windows of guesses (`sampling/parallel.py`). Also the steps of each, and the tokens that differ
pool       a step of 16 and 64 rows of one caption: all at one position, in a graph and without one, and each at a
           random position, without a graph

The results decide if windows and rows at several positions are worth graphs and another kernel.
"""

from __future__ import annotations

import statistics
from functools import partial
from math import prod
from typing import Any

import torch
from common import DEVICE, Results, parser
from torch import Tensor

import limner
from limner.attention.cache import KVCache
from limner.numerics.seeding import fold_in
from limner.pipeline import TextToImage
from limner.planner.throughput import median_seconds
from limner.sampling.cuda_graph import GraphedDecoder, cuda_graph, eager
from limner.sampling.decoder import TokenDecoder
from limner.sampling.parallel import generate

CAPTIONS = {"scenes": "a small red circle", "icons": "a red heart", "glyphs": "a tractor, lucide"}
POOL_STEPS = 8


def main() -> None:
    """Time drawing for each model and number of candidates, then the pool."""
    options = parser(__doc__).parse_args()
    results = Results("parallel", options)
    numbers, rounds = ((1, 2), 1) if options.quick else ((1, 16, 64), 5)
    for name in list(CAPTIONS)[: 1 if options.quick else None]:
        pipe = limner.load(name, device=DEVICE)
        for n in numbers:
            results.measure(f"{name}, {n} drawn", lambda p=pipe, n=n, c=CAPTIONS[name]: drawing(p, c, n, rounds))
        for n in numbers[1:]:
            results.measure(f"{name}, pool of {n}", lambda p=pipe, n=n, c=CAPTIONS[name]: pool(p, c, n, rounds))


class Counted:
    """A decoder whose steps are counted. `steps` is the number since it was set."""

    def __init__(self, decoder: TokenDecoder, max_window: int) -> None:
        self.decoder, self.steps, step = decoder, 0, decoder.step
        decoder.max_window = max_window

        def counted(cache: KVCache, tokens: Tensor) -> Tensor:
            self.steps += 1
            return step(cache, tokens)

        decoder.step = counted


def decoders(pipe: TextToImage) -> dict[str, Counted]:
    """Return the ways of drawing."""
    model, window = pipe.engine.models.decoder.model, TokenDecoder.max_window
    capture = cuda_graph if DEVICE.type == "cuda" else eager
    return {
        "one by one, graph": Counted(GraphedDecoder(model, capture), 1),
        "one by one": Counted(TokenDecoder(model), 1),
        "parallel": Counted(TokenDecoder(model), window),
    }


@torch.inference_mode()
def drawing(pipe: TextToImage, caption: str, n: int, rounds: int) -> dict[str, Any]:
    """Return seconds of each way, medians over rounds, its ratio to the first, and its steps."""
    text = pipe.request(caption, n, sampler=pipe.defaults.sampler, seed=0).text[None].to(DEVICE)
    ways, seconds, tokens, steps = decoders(pipe), dict[str, list[float]](), dict[str, list[Tensor]](), {}
    for number in range(rounds + 1):  # the first warms up, and captures graphs
        for name, way in ways.items():
            way.steps, drawn = 0, list[Tensor]()
            taken = median_seconds(partial(draw, pipe, way.decoder, text, n, fold_in(number), drawn), 1)
            if number:
                seconds.setdefault(name, []).append(taken)
                tokens.setdefault(name, []).append(drawn[-1].cpu())
                steps[name] = way.steps / len(drawn)
    first = next(iter(ways))
    return {
        name: {
            "seconds": statistics.median(times),
            "ratio": statistics.median(a / b for a, b in zip(seconds[first], times, strict=True)),
            "steps": steps[name],
            "tokens that differ": sum(int((a != b).sum()) for a, b in zip(tokens[first], tokens[name], strict=True)),
            "tokens": sum(x.numel() for x in tokens[name]),
        }
        for name, times in seconds.items()
    }


def draw(pipe: TextToImage, decoder: TokenDecoder, text: Tensor, n: int, seed: int, drawn: list[Tensor]) -> None:
    """Append the tokens of `n` candidates to `drawn`."""
    drawn.append(generate(decoder, text, range(n), pipe.defaults.sampler, seed=seed).tokens)


@torch.inference_mode()
def pool(pipe: TextToImage, caption: str, n: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of a step of `n` rows at one position and at different ones."""
    text = pipe.request(caption, n, sampler=pipe.defaults.sampler, seed=0).text[None].to(DEVICE)
    ways, length = decoders(pipe), prod(pipe.prior.config.grid)
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randint(0, length - POOL_STEPS, (n, 1), generator=generator).to(DEVICE)
    token, milliseconds = torch.zeros(n, 1, dtype=torch.long, device=DEVICE), {}
    for name, way, window in (
        ("one position, graph", "one by one, graph", 1), ("one position", "one by one", 1), ("mixed", "parallel", 2)
    ):  # fmt: skip
        decoder = ways[way].decoder
        cache = decoder.prefill(text, window)[0].expand(n)
        begin = mixed if window > 1 else length // 2

        def steps(cache: Any = cache, begin: Any = begin, decoder: TokenDecoder = decoder) -> None:
            cache.length = begin
            for _ in range(POOL_STEPS):
                decoder.step(cache, token)

        steps()
        milliseconds[name] = 1e3 * statistics.median(median_seconds(steps, 1) for _ in range(rounds)) / POOL_STEPS
    return milliseconds


if __name__ == "__main__":
    main()
