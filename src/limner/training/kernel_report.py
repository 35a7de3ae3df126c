"""The proof that a run is stored and computed as its precision says: formats and counts of kernels, kept with the run.

    RUN/STAGE/precision.json    for each linear layer: its kind, the format of its weight, and for one of low precision
                                its products, their kernels, and how often each ran

`limner inspect precision RUN` shows it. The file is as old as the newest checkpoint, which holds the counts as well: so
a run that is killed and goes on counts each of its updates once.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from limner.json_files import write_json
from limner.layers.kernel_counter import Counts, from_rows, to_rows
from limner.layers.low_precision import LowPrecisionLinear
from limner.training.hooks import Hook
from limner.training.train_state import Run

FILE = "precision.json"


class KernelCounts(Hook):
    """Writes the counts to the folder `out` whenever the run is saved; the first process writes its own."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._before: dict[str, Counts] = {}  # what earlier processes of the run have counted
        self._now: dict[str, Counts] = {}

    def on_save(self, run: Run) -> None:
        layers = {name: x for name, x in run.model.named_modules() if isinstance(x, nn.Linear)}
        counts = {name: x.tally.counts for name, x in layers.items() if isinstance(x, LowPrecisionLinear)}
        self._now = {name: self._before.get(name, Counter()) + now for name, now in counts.items()}
        if run.parallel.is_main:
            found = {
                "step": run.step,
                "precision": type(run.config.precision).__name__,
                "layers": [
                    {
                        "name": name,
                        "kind": type(layer).__name__,
                        "weight": str(layer.weight.dtype).removeprefix("torch."),
                        "products": to_rows(self._now.get(name, Counter())),
                    }
                    for name, layer in layers.items()
                ],
            }
            write_json(self.out / FILE, found, indent=1)

    def state_dict(self) -> dict[str, Any]:
        return {"layers": {name: to_rows(counts) for name, counts in self._now.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = {name: from_rows(rows) for name, rows in state["layers"].items()}
