"""Parallel sampling against sampling token by token: passes, tokens that differ, and time, for the bundled models.

    python bench/parallel.py                              # one candidate, 16 candidates, primed, inpainted
    python bench/parallel.py --seeds 40 --precision bf16  # counts more tokens

Both sides draw the same captions and seeds in alternation, in one process with one thread. Times are CPU seconds of
sampling alone, and ratios are medians over drawings. Primed drawings keep the upper half of another candidate,
inpainted ones all but its middle ninth.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

import limner
from limner.numerics.precision import Bf16, Fp32
from limner.pipeline import TextToImage
from limner.sampling.decoder import TokenDecoder
from limner.sampling.generate import UNSET
from limner.sampling.parallel import generate

CAPTIONS = {
    "scenes": ["a small red circle", "a blue square above a green triangle", "two large yellow stars"],
    "icons": ["hamburger", "a red heart", "a cat"],
}


class Side:
    """Sampling with a largest window, and the passes it took."""

    def __init__(self, pipe: TextToImage, window: int) -> None:
        self.pipe, self.decoder, self.passes = pipe, TokenDecoder(pipe.engine.models.decoder.model), 0
        self.decoder.max_window = window
        self.decoder.model.head.image.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.passes += 1

    def draw(self, caption: str, candidates: range, seed: int, prompt: Tensor | None) -> tuple[Tensor, int, float]:
        """Return tokens [N, S], passes and CPU seconds."""
        text = self.pipe.tokenizer.encode([caption], self.pipe.prior.config.text_len)
        self.passes, start = 0, time.process_time()
        group = generate(self.decoder, text, candidates, self.pipe.defaults.sampler, seed=seed, prompt_tokens=prompt)
        return group.tokens[0], self.passes, time.process_time() - start


def prompts(tokens: Tensor, grid: tuple[int, int]) -> dict[str, Tensor]:
    """Return a primed and an inpainted prompt [1, S] of a drawing's tokens [S]."""
    (h, w), primed, inpainted = grid, tokens.clone(), tokens.clone().view(grid)
    primed[len(tokens) // 2 :] = UNSET
    inpainted[h // 3 : 2 * h // 3, w // 3 : 2 * w // 3] = UNSET
    return {"primed": primed[None], "inpainted": inpainted.view(1, -1)}


def compare(name: str, options: argparse.Namespace) -> None:
    """Print a line for each task of a model."""
    pipe = limner.load(name, precision={"fp32": Fp32, "bf16": Bf16}[options.precision](), device="cpu")
    sides = [Side(pipe, window) for window in (1, TokenDecoder.max_window)]
    rows: dict[str, list[tuple[float, float, float, int, int, int]]] = {}
    for seed in range(options.seeds):
        for caption in CAPTIONS[name]:
            other = sides[1].draw(caption, range(options.candidates, options.candidates + 1), seed, None)[0][0]
            tasks = {"one": (1, None), "many": (options.candidates, None)}
            tasks |= {kind: (1, prompt) for kind, prompt in prompts(other, pipe.prior.config.grid).items()}
            for task, (n, prompt) in tasks.items():
                (a, before, slow), (b, after, fast) = (side.draw(caption, range(n), seed, prompt) for side in sides)
                differing = int((a != b).any(-1).sum())
                rows.setdefault(task, []).append((slow / fast, before, after, differing, len(a), a.numel()))
    for task, found in rows.items():
        ratio, before, after = (statistics.median(row[i] for row in found) for i in range(3))
        differing, drawings, tokens = (sum(row[i] for row in found) for i in (3, 4, 5))
        passes = [row[2] for row in found]
        print(
            f"{name:7} {task:10} passes {before:.0f} -> {after:.0f} ({min(passes):.0f} to {max(passes):.0f}), "
            f"{ratio:.2f}x faster, {differing} of {drawings} drawings ({tokens:,} tokens) differ",
            flush=True,
        )


def main() -> None:
    """Print a line for each model and task."""
    parser = argparse.ArgumentParser(description="parallel sampling against sampling token by token")
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    torch.set_num_threads(1)
    options = parser.parse_args()
    for name in CAPTIONS:
        compare(name, options)


if __name__ == "__main__":
    main()
