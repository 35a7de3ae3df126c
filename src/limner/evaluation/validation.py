"""An objective's metrics on held-out samples, during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from limner.data.stream import Dataset
from limner.training.train_module import Objective
from limner.training.train_state import Evaluate


def held_out_metrics(objective: Objective, data: Dataset, batch_size: int, device: torch.device) -> Evaluate:
    """An evaluation that averages the metrics over batches of all of `data`, the same samples each time.

    A batch counts by its samples: among the few of a last one a caption is easily told, a single one always.
    """
    rows = np.arange(len(data))
    batch = data.batch(rows, rows.astype(np.uint64))

    def evaluate(model: Any, step: int) -> Mapping[str, float]:
        found = []
        generator = torch.Generator(device).manual_seed(0)  # each time, whenever the process began
        for start in range(0, len(rows), batch_size):
            part = {k: v[start : start + batch_size].to(device) for k, v in batch.items()}
            share = len(rows[start : start + batch_size]) / len(rows)
            metrics = objective(model, part, step, generator)[1]
            found.append({name: share * value.float() for name, value in metrics.items()})
        return {name: float(torch.stack([f[name] for f in found]).sum()) for name in found[0]}

    return evaluate
