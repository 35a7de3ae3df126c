"""Convergence of the prior's blocks from the bottom up, measured by SVCCA (Raghu et al. 2017).

SVCCA compares two sets of activations on the same inputs by the subspaces that they span, so it compares a block with
itself at another step although its features have rotated. PipeTransformer (He et al. 2021) freezes leading blocks
because these reach their last representation first (Figure 2).

Shapes: n positions of a batch, c and d features, K snapshots, L blocks, S seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from limner.experiments.report import Finding, experiment
from limner.experiments.sweep import Result, Sweep, all_above, over_seeds, span
from limner.experiments.tiny_models import PRIOR, held_out, train_prior
from limner.training.hooks import Hook
from limner.training.train_state import TrainState

SCENES = 128  # held-out scenes of a snapshot
BATCH = 64


def svcca_similarity(x: Float[Tensor, "n c"], y: Float[Tensor, "n d"], share: float = 0.99) -> float:
    """Return the mean canonical correlation of two sets of activations, from 0 to 1 (Raghu et al. 2017, §2).

    Each set is reduced to the leading singular directions that hold `share` of its variance; the correlations are those
    of the two subspaces, as many as the smaller one has directions. Noise correlates by about (d / n) ** 0.5, so n must
    be many times d.
    """
    return float(torch.linalg.svdvals(_leading_directions(x, share).mT @ _leading_directions(y, share)).mean())


def _leading_directions(x: Float[Tensor, "n d"], share: float) -> Float[Tensor, "n k"]:
    """Return an orthonormal basis of the fewest singular directions with a share of the variance."""
    u, s, _ = torch.linalg.svd(x.double() - x.double().mean(0), full_matrices=False)
    variance = s.square().cumsum(0)
    return u[:, : int((variance < share * variance[-1]).sum()) + 1]


class BlockRecorder(Hook):
    """Keeps the outputs of all blocks at the image positions of held-out scenes, every `every` steps from step 0 on."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.snapshots: list[list[Tensor]] = []

    def before_step(self, run: TrainState) -> None:
        if run.step % self.every == 0:
            self.record(run)

    @torch.no_grad()
    def record(self, run: TrainState) -> None:
        """Add a snapshot, L tensors [n, d]."""
        model: Any = run.model
        batch, snapshot = held_out(SCENES), []
        x = model.inputs(**batch)
        for block in range(len(model.blocks)):
            x = model.run(x, block, block + 1)
            snapshot.append(model.outputs(x, batch["text"])[1].flatten(0, 1))
        self.snapshots.append(snapshot)


def trial(*, every: int, **settings: Any) -> Result:
    """Return the losses, and the similarity of each block in each snapshot with the same block at the end: K lists with
    L numbers."""
    recorder = BlockRecorder(every)
    run, losses = train_prior(model=PRIOR, hooks=lambda run: [recorder], **settings)
    recorder.record(run)
    last = recorder.snapshots[-1]
    similarity = [[svcca_similarity(*pair) for pair in zip(now, last, strict=True)] for now in recorder.snapshots]
    return {"loss": losses, "similarity": similarity}


@experiment(
    "Layers converge from the bottom up: by SVCCA, lower blocks resemble their final state earlier than higher ones",
    "He et al. 2021 (PipeTransformer), Figure 2; Raghu et al. 2017",
)
def svcca(folder: Path, quick: bool) -> Finding:
    """Compare the mean similarity of blocks with their final state over the snapshots before the last one.

    This mean is the area under a curve of Figure 2. A block can have a larger area because it starts closer to its
    final state, so the table also gives the share of its way: (area - start) / (1 - start).
    """
    seeds, steps, every = (range(1), 8, 4) if quick else (range(8), 300, 25)
    results = Sweep(folder, trial, {"prior": {}}, seeds, steps=steps, batch=BATCH, every=every)
    similarity = results.runs["prior"].values("similarity")  # [S, K, L]
    start, area = similarity[:, 0], similarity[:, :-1].mean(1)
    depth, third = area.shape[1], -(-area.shape[1] // 3)
    gap = over_seeds(area[:, :third].mean(1) - area[:, -third:].mean(1))
    way = (area - start) / (1 - start)
    curves = {
        f"block {block + 1}": [(every * k, float(value)) for k, value in enumerate(similarity[:, :, block].mean(0))]
        for block in range(depth)
    }
    return Finding(
        all_above([gap]),
        f"The mean similarity with the final state is {area[:, :third].mean():.3f} in the lowest {third} blocks and "
        f"{area[:, -third:].mean():.3f} in the highest {third}, a difference of {gap}. Their shares of the way are "
        f"{way[:, :third].mean():.0%} and {way[:, -third:].mean():.0%}.",
        ("block", "mean similarity", "of seeds", "at the first step", "share of the way"),
        [
            (
                block + 1, f"{area[:, block].mean():.3f}", span(area[:, block], ".3f"), f"{start[:, block].mean():.3f}",
                f"{way[:, block].mean():.0%}",
            )
            for block in range(depth)
        ],
        {"similarity with the final state, mean of seeds": curves, "loss, first seed": results.curves},
        results.settings,
    )  # fmt: skip
