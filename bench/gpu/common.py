"""Measurements of the GPU scripts, saved one by one so that a later call continues.

A machine may be lost, or its time may end, in the middle of a script. So a script names its measurements, and `$OUT`
has a JSON file that is written after each of them. A call with `--from FOLDER` repeats only what the file in FOLDER
lacks. Measurements of another card, commit or size are not continued.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from limner.json_files import write_json

OUT = Path(os.environ.get("OUT", "runs/gpu"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--quick", action="store_true", default=DEVICE.type == "cpu", help="tiny sizes; the default without a GPU"
    )
    options.add_argument("--from", dest="earlier", type=Path, default=OUT, help="folder of an earlier call's results")
    return options


def commit() -> str:
    """Return the commit of this checkout; in a copy without git's folder, `$COMMIT`."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def free() -> None:
    """Free compiled code, its CUDA graphs and unused memory."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


class Results:
    """The results of a script, `$OUT/NAME.json`.

    Attributes:
        values: results by name of the measurement.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.path = OUT / f"{name}.json"
        self.environment = {
            "card": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "none",
            "torch": torch.__version__, "commit": commit(), "quick": options.quick,
        }  # fmt: skip
        self.values: dict[str, Any] = {}
        earlier = options.earlier / self.path.name
        if earlier.exists():
            saved = json.loads(earlier.read_text())
            if saved["environment"] == self.environment:
                self.values = saved["results"]
            else:
                print(f"{earlier} is not continued: it is from {saved['environment']}")

    def measure(self, name: str, function: Callable[[], Any]) -> Any:
        """Return the earlier result of this name, or else save that of `function()`.

        An exception becomes the result {"error": its last lines}; a later call tries again.
        """
        earlier = self.values.get(name)
        if earlier is not None and not (isinstance(earlier, dict) and "error" in earlier):
            return earlier
        start = time.perf_counter()
        try:
            result = function()
        except Exception:
            result = {"error": traceback.format_exc()[-2_000:]}
        free()
        self.save(name, result)
        print(f"{name} ({time.perf_counter() - start:.0f} s): {str(result)[-300:]}", flush=True)
        return result

    def save(self, name: str, result: Any) -> None:
        """Set a result and write the file."""
        self.values[name] = result
        content = {"date": date.today().isoformat(), "environment": self.environment, "results": self.values}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, content, indent=1)


def kernel_times(function: Callable[[], object], repeats: int) -> list[dict[str, Any]]:
    """Return the kernels of a call (on a CPU, the operators): name, launches and microseconds, longest first."""
    on_gpu = DEVICE.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(repeats):
            function()
        if on_gpu:
            torch.cuda.synchronize()
    microseconds = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [
        {
            "kernel": event.key[:120],
            "launches": event.count / repeats,
            "microseconds": getattr(event, microseconds) / repeats,
        }
        for event in profiler.key_averages()
    ]
    return sorted(events, key=lambda event: -event["microseconds"])
