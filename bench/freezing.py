"""Training steps of the prior of `scenes` with frozen blocks, computed and cached, against steps without.

    OMP_NUM_THREADS=1 python bench/freezing.py
    OMP_NUM_THREADS=1 python bench/freezing.py --depth 12 --batch 8    # random weights

Each variant trains its own copy of the model on the same samples, which the cache holds after the first rounds.
Variants alternate in rounds of one step. The output has medians of the CPU time of a step, median ratios within a
round, and the largest difference of the losses of computed and cached steps.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from limner.bundles import load_model
from limner.data.datasets import CaptionEncoding, TokenDataset
from limner.data.stream import Stream
from limner.models.transformer import Transformer
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.training.auto_cache import AutoCache
from limner.training.config import TrainConfig
from limner.training.freezing import Freezing
from limner.training.freezing_rules import ScheduledFreezing
from limner.training.hooks import Hook
from limner.training.step import update
from limner.training.train_state import TrainState


class Numbers:
    """A tokenizer of numbers, whose captions fill half of the text positions."""

    def encode(self, captions, length, dropout=0.0, rng=None):
        text = torch.full((len(captions), length), -1)
        text[:, : length // 2] = torch.tensor([[int(caption)] for caption in captions])
        return text


class Variant:
    """A run whose first `share` of the blocks is frozen."""

    def __init__(self, model: Transformer, data: TokenDataset, batch: int, share: float, folder: Path | None) -> None:
        config = TrainConfig(steps=10**6, batch_size=batch, optimizer=AdamWConfig(lr=1e-5), seed=0)
        self.run = TrainState(copy.deepcopy(model).requires_grad_(True), Autoregressive(text_weight=0.0), config)
        freezing = Freezing(self.run, ScheduledFreezing(share=share, start=0, end=0), 1, lambda metrics: 0.0)
        freezing.level = share * model.config.depth + 1e-9
        freezing.before_training(self.run)
        self.hooks: list[Hook] = [freezing]
        if folder:
            self.hooks.append(AutoCache(self.run, freezing, folder, 1 << 30, [data]))
        self.stream, self.seconds, self.losses = Stream(data, batch), list[float](), list[float]()

    def step(self, timed: bool) -> None:
        """Train one step."""
        batch, start = next(self.stream), time.process_time()
        update(self.run, batch, self.hooks)
        self.losses.append(self.run.loss)
        if timed:
            self.seconds.append(time.process_time() - start)


def main() -> None:
    """Time all variants alternately, and print medians and ratios."""
    parser = argparse.ArgumentParser(description="training steps with frozen and cached blocks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--depth", type=int, help="blocks of a model with random weights, instead of `scenes`")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = load_model("scenes", "prior")
    if options.depth:
        model = replace(model.config, depth=options.depth).build()
    config, samples = model.config, 2 * options.batch
    tokens = torch.randint(config.image_vocab, (samples, config.grid[0] * config.grid[1]), dtype=torch.int32)
    text = CaptionEncoding(tokenizer=Numbers(), length=config.text_len)
    data = TokenDataset(tokens, [(str(i),) for i in range(samples)], text)
    shares = {"half": 1 / 2, "two thirds": 2 / 3}
    with tempfile.TemporaryDirectory() as folder:
        variants = {"none": Variant(model, data, options.batch, 0.0, None)}
        for name, share in shares.items():
            variants[f"{name} frozen"] = Variant(model, data, options.batch, share, None)
            variants[f"{name} cached"] = Variant(model, data, options.batch, share, Path(folder) / name)
        for i in range(2 + options.rounds):
            for variant in variants.values():
                variant.step(timed=i >= 2)  # the first two rounds fill the caches
    print(
        f"{config.depth} blocks of width {config.width}, batches of {options.batch}, {torch.get_num_threads()} threads"
    )
    for name, variant in variants.items():
        ratio = statistics.median(a / b for a, b in zip(variants["none"].seconds, variant.seconds, strict=True))
        print(f"{name:18} {1e3 * statistics.median(variant.seconds):8.1f} ms per step, {ratio:5.2f} times as fast")
    for name in shares:
        pairs = zip(variants[f"{name} frozen"].losses, variants[f"{name} cached"].losses, strict=True)
        print(f"{name}: losses differ by at most {max(abs(a - b) for a, b in pairs):.1e}")


if __name__ == "__main__":
    main()
