"""Metrics of an objective on held-out samples during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from limner.data.stream import Dataset
from limner.training.train_module import Objective
from limner.training.train_state import Evaluate


def held_out_metrics(objective: Objective, data: Dataset, batch_size: int, device: torch.device) -> Evaluate:
    """Return an evaluation that averages the objective's metrics over all of `data`.

    Samples and noise are the same each time. Batches are weighted by their sizes. A small last batch makes contrastive
    metrics easier, so it must not count as much as a full one.
    """
    rows = np.arange(len(data))
    batch = data.batch(rows, rows.astype(np.uint64))

    def evaluate(model: Any, step: int) -> Mapping[str, float]:
        weighted = []
        generator = torch.Generator(device).manual_seed(0)  # independent of the step and of resuming
        for start in range(0, len(rows), batch_size):
            samples = {k: v[start : start + batch_size].to(device) for k, v in batch.items()}
            share = len(rows[start : start + batch_size]) / len(rows)
            metrics = objective(model, samples, step, generator)[1]
            weighted.append({name: share * value.float() for name, value in metrics.items()})
        return {name: float(torch.stack([m[name] for m in weighted]).sum()) for name in weighted[0]}

    return evaluate
