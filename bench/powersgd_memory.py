"""Peak memory of an update with PowerSGD: gradients decompressed block by block, and all together.

    python bench/powersgd_memory.py                       # 4 processes, 128 resblocks as in the paper, of width 256
    python bench/powersgd_memory.py --depth 24 --width 512

Gloo processes, each with all weights, train a prior for two updates. `limner` decompresses gradients block by block
(App. E.2, step 11); the comparison sets all of them before the optimizer starts. Each process reports its peak of live
tensor bytes in the last update (`limner.planner.memory_tracker`) and the growth of its resident memory. The expected
difference is the size of all compressed gradients, less those of the largest resblock.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from memory_per_rank import resident, start
from torch import distributed, nn

from limner.distributed.powersgd import PowerSGD
from limner.distributed.replicated import Replicated
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.planner.memory_tracker import MemoryTracker
from limner.training.config import TrainConfig
from limner.training.step import update
from limner.training.train_state import TrainState

PROCESSES, UPDATES = 4, 2


class AllTogether(PowerSGD):
    """PowerSGD that decompresses all gradients before the update."""

    def parts(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        for matrix, p, q in self.factors.values():
            matrix.set_grad(matrix.rounded_product(p, q))
        self.factors.clear()
        yield [p for p in parameters if p.grad is not None]


REDUCERS = {"block by block": PowerSGD, "all together": AllTogether}


def main() -> None:
    """Start the processes of each kind, and print their peaks."""
    parser = argparse.ArgumentParser(description="peak memory of updates with PowerSGD")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--kind", choices=REDUCERS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(work(options)))
        return
    results = {kind: start(__file__, PROCESSES, "--kind", kind) for kind in REDUCERS}
    throttled, plain = results.values()
    print(f"{PROCESSES} processes, {2 * options.depth} resblocks of width {options.width}; MB by process")
    for kind, ranks in results.items():
        for name in ("peak", "growth"):
            print(f"  {kind:15} {name:7}" + "".join(f"{rank[name] / 1e6:9.2f}" for rank in ranks))
    saved = [(b["peak"] - a["peak"]) / 1e6 for a, b in zip(throttled, plain, strict=True)]
    print("  saved          peak   " + "".join(f"{value:9.2f}" for value in saved))
    print(f"  expected       peak   {throttled[0]['expected'] / 1e6:9.2f}")


def work(options: argparse.Namespace) -> dict[str, int]:
    """Train as one process, and return its measurements in bytes."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{options.rendezvous}", rank=options.rank, world_size=PROCESSES,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    config = TransformerConfig(
        text_vocab=64, image_vocab=64, text_len=2, grid=(2, 2), width=options.width, depth=options.depth,
        heads=options.width // 64,
    )  # fmt: skip
    training = TrainConfig(steps=UPDATES, batch_size=PROCESSES, optimizer=AdamWConfig(), precision=Fp32())
    torch.manual_seed(0)
    try:
        with MemoryTracker() as tracker:
            before = resident()
            parallel = Replicated(REDUCERS[options.kind])
            run = TrainState(config.build(), Autoregressive(), training, "cpu", parallel)
            for _ in range(UPDATES):
                tracker.reset()
                update(run, {"text": torch.randint(0, 64, (1, 2)), "image": torch.randint(0, 64, (1, 4))})
            growth = resident() - before
        reducer: Any = parallel.reduction.reducer  # type: ignore[attr-defined]
        blocks = [sum(m.parameter.nbytes for m in block) for block in reducer.blocks.values()]
        return {"peak": tracker.peak, "growth": growth, "expected": sum(blocks) - max(blocks)}
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
