"""Loss after 500 updates with PowerSGD-compressed gradients between two replicas, compared with uncompressed ones.

    python bench/compressed_loss.py

The same small prior, batches and seeds, with and without compression. By default the rank is a twelfth of the width,
as in `bench/slow_links.py`. The loss of a seed is the mean of its last 50 updates. Finished trials are cached in
`--folder`.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch

from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.experiments import replicas
from limner.experiments.sweep import Sweep

LAST_UPDATES = 50


def main() -> None:
    """Train with and without compression, once for each seed, and print the losses."""
    parser = argparse.ArgumentParser(description="the loss with compressed gradients")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--rank", type=int, help="rank of PowerSGD")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("compressed"))
    options = parser.parse_args()
    rank, seeds = options.rank or options.width // 12, range(1, options.seeds + 1)
    reducers = {0: Fp32Reducer, rank: partial(PowerSGD, PowerSGDConfig(rank=rank))}
    grid = {r: {"reducer": reducer} for r, reducer in reducers.items()}
    sweep = Sweep(options.folder, replicas.trial, grid, seeds, width=options.width, steps=options.steps)
    plain, compressed = (runs.losses(LAST_UPDATES).tolist() for runs in sweep.runs.values())
    print(f"torch {torch.__version__}; width {options.width}, rank {rank}, {options.steps} updates")
    print(f"{'seed':8}{'uncompressed':>14}{'compressed':>12}{'change':>9}")
    for seed, a, b in zip(seeds, plain, compressed, strict=True):
        print(f"{seed:<8}{a:14.4f}{b:12.4f}{b - a:+9.4f}")
    gaps = [b - a for a, b in zip(plain, compressed, strict=True)]
    print(
        f"{'mean':8}{statistics.fmean(plain):14.4f}{statistics.fmean(compressed):12.4f}{statistics.fmean(gaps):+9.4f}"
    )
    if options.seeds > 1:
        print(f"standard deviation over seeds, uncompressed: {statistics.stdev(plain):.4f}")


if __name__ == "__main__":
    main()
