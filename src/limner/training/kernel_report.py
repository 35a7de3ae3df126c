"""A report of the weight formats and kernels that a run used, as evidence that its precision setting took effect.

    RUN/STAGE/precision.json    for each linear layer: its kind and the format of its weight; for low-precision layers
                                also their matrix products, the kernels, and the number of calls of each

`limner inspect precision RUN` shows it. The file is written with each checkpoint, which also holds the counts.
Therefore a run that was killed and resumed counts each update once.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from limner.json_files import write_json
from limner.quantization.low_precision import LowPrecisionLinear
from limner.quantization.products import Counts, counts_from_json, counts_to_json
from limner.training.hooks import Hook
from limner.training.train_state import TrainState

FILE = "precision.json"


class KernelReport(Hook):
    """Writes the report to the folder `out` at each checkpoint, with the counts of the first process."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._resumed: dict[str, Counts] = {}  # counts at the resume
        self._total: dict[str, Counts] = {}

    def before_save(self, run: TrainState) -> None:
        layers = {name: x for name, x in run.model.named_modules() if isinstance(x, nn.Linear)}
        counts = {name: x.counter.counts for name, x in layers.items() if isinstance(x, LowPrecisionLinear)}
        self._total = {name: self._resumed.get(name, Counter()) + count for name, count in counts.items()}
        if run.parallel.is_main:
            report = {
                "step": run.step,
                "precision": type(run.config.precision).__name__,
                "layers": [
                    {
                        "name": name,
                        "kind": type(layer).__name__,
                        "weight": str(layer.weight.dtype).removeprefix("torch."),
                        "products": counts_to_json(self._total.get(name, Counter())),
                    }
                    for name, layer in layers.items()
                ],
            }
            write_json(self.out / FILE, report, indent=1)

    def state_dict(self) -> dict[str, Any]:
        return {"layers": {name: counts_to_json(counts) for name, counts in self._total.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed = {name: counts_from_json(rows) for name, rows in state["layers"].items()}
