"""Recording of training steps with torch.profiler as a hook.

    RUN/STAGE/profile/rank0.json.gz    operators, allocations, and the spans of `spans.py`, per rank

The profiler warms up in the step before the first one. A step of the trace lasts from the end of an update to the end
of the next: it has the log, the checkpoint and the input between them.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

from torch import profiler

from limner.atomic_io import atomic_write_bytes
from limner.errors import UserError
from limner.json_files import to_json
from limner.profiling.url import Url
from limner.spans import listeners
from limner.training.hooks import Hook
from limner.training.train_state import TrainState
from limner.validation import abbreviate

FOLDER = "profile"  # in the folder of a stage
MAX_STEPS = 100  # of a trace, which the profiler keeps in memory


class ProfileRecorder(Hook):
    """Records the updates between two steps to the folder `out`. A URL that cannot be written gives a warning.

    Args:
        first, last: numbers of updates done before and after; `first` is at least 1.
        stacks: record Python calls, which the report needs to name source lines. Slower.
    """

    def __init__(self, out: Path | Url, first: int, last: int, stacks: bool = False) -> None:
        self.out, self.first, self.last, self.stacks = out, first, last, stacks
        self._profile: profiler.profile | None = None
        self._rank, self._written, self._loading = 0, False, defaultdict[str, list[int]](list)

    def before_step(self, run: TrainState) -> None:
        if run.step == self.first - 1:
            self._rank = run.parallel.rank
            self._profile = profiler.profile(
                schedule=profiler.schedule(wait=0, warmup=1, active=self.last - self.first, repeat=1),
                on_trace_ready=self._write,
                record_shapes=run.parallel.world_size > 1,  # for the bytes of collectives; half of the cost
                profile_memory=True,
                with_stack=self.stacks,
            )
            self._profile.start()
            listeners.add(self._add_loaded)

    def after_update(self, run: TrainState) -> None:
        if run.step == min(self.last, run.config.steps):
            self._stop()
        elif self._profile:
            self._profile.step()
            if run.step == self.first:
                self._loading.clear()  # the warm-up

    def close(self) -> None:
        """Write the steps recorded so far, or warn that none was recorded."""
        self._stop()
        if not self._written:
            warnings.warn(f"{self.out}: no step from {self.first} to {self.last} was trained to profile", stacklevel=2)

    def _stop(self) -> None:
        if self._profile:
            listeners.remove(self._add_loaded)
            loading = {part: (len(times), sum(times)) for part, times in self._loading.items()}
            self._profile.add_metadata_json("limner", to_json({"first_step": self.first, "loading": loading}))
            self._profile.stop()
            self._profile = None

    def _add_loaded(self, part: str, time: int) -> None:
        self._loading[part].append(time)

    def _write(self, profile: profiler.profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json.gz"
            profile.export_chrome_trace(str(file))
            data, out = file.read_bytes(), self.out / f"rank{self._rank}.json.gz"
        self._written = True
        if isinstance(out, Path):
            atomic_write_bytes(out, data)
            return
        try:
            out.write_bytes(data)
        except UserError as error:  # a run does not end because a server is out of reach
            warnings.warn(f"the trace of rank {self._rank} is lost: {error}", stacklevel=2)


def parse_steps(text: str) -> tuple[int, int]:
    """Return the numbers of "10:13". Raises `UserError`."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first < last <= first + MAX_STEPS:
        raise UserError(
            f"--profile cannot be {abbreviate(text)}: give two steps such as 10:13, the first at least 1, the second "
            f"1 to {MAX_STEPS} more"
        )
    return first, last
