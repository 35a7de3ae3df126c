"""`limner bench`: how fast a prior draws and trains on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import nan
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from tyro.conf import arg

from limner.cli import validate_choice
from limner.cli.arguments import OutputPNG, parse
from limner.errors import UserError, escape_control
from limner.progress import progress
from limner.sampling.generation_config import CANDIDATES
from limner.text_table import render_table
from limner.validation import Range, Validated


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Validated):
    """Time drawing and training of a prior with random weights, with the paper's sparse attention and with dense
    attention, and compare them with the machine's limits. Close other programs first."""

    size: Annotated[str, arg(metavar="NAME")] = "small"
    """Model size, from tiny to dalle-12b; 256 text tokens, 8,192 image codes."""
    candidates: Annotated[tuple[int, ...], CANDIDATES] = (1, 64)
    """Numbers of candidates of one caption, drawn in one batch."""
    grids: Annotated[tuple[int, ...], Range(1, 128)] = (32,)
    """Side lengths of the image token grid."""
    batch: Annotated[int, Range(0, 2**16)] = 4
    """Samples per training step; 0 skips training."""
    checkpointing: bool = False
    """Train with activations recomputed in the backward pass."""
    compiled: bool = False
    """Draw with compiled steps; the first run compiles for half a minute per line of the table."""
    rounds: Annotated[int, Range(1, 1_000)] = 3
    """Rounds that alternate sparse and dense; the table shows medians over rounds."""
    plot: OutputPNG = None
    """Also plot the cost over candidates and grids as a PNG (needs matplotlib)."""


def main(argv: Sequence[str]) -> None:
    """Time drawing and training, and print a table."""
    options = parse(BenchOptions, argv, "limner bench")
    if not options.candidates or not options.grids:
        raise UserError("--candidates and --grids need at least one number each")
    from limner.models.transformer import SIZES

    validate_choice(options.size, list(SIZES), "size")
    if options.plot and not find_spec("matplotlib"):
        raise UserError('plots need matplotlib: run pip install "limner[plot]"')
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {name}")
    size = SIZES[options.size]
    results = [_measure_grid(options, replace(size, grid=(side, side)), device) for side in options.grids]
    if options.plot:
        _plot(options, results, options.plot)
        print(f"written: {escape_control(options.plot)}")


def _measure_grid(options: BenchOptions, config: Any, device: Any) -> dict[str, Any]:
    """Print results of one grid. Return seconds per picture by candidates and attention, and per training sample."""
    from limner.planner import throughput

    configs = {"sparse": config, "dense": replace(config, pattern="dense")}
    machine = throughput.measure_rates(device)
    h, w = config.grid
    print(
        f"\n{options.size}: width {config.width}, {config.depth} layers, {config.heads} heads; {config.text_len} text "
        f"and {h} x {w} image tokens\nproduct {machine.gemm / 1e12:.2f} TFLOP/s, copy {machine.copy / 1e9:.1f} GB/s"
    )
    rows, drawn, trained = [], {}, {}
    for n in options.candidates:

        def draw(name: str, n: int = n) -> Any:
            return throughput.time_generation(
                configs[name], n, device, shared=name == "sparse", compiled=options.compiled
            )

        times = _measure_rounds(f"drawing, {n:,} candidates", options.rounds, draw)
        drawn[n] = {name: median(t.seconds for t in times[name]) / n for name in times}
        for name in times:
            step, first = median(t.step for t in times[name]), times[name][0]
            ratio = median(t.seconds / sparse.seconds for t, sparse in zip(times[name], times["sparse"], strict=True))
            slowdown = step / throughput.min_step_seconds(configs[name], n, machine)
            figures = (f"{step * 1e3:.2f}", f"{1 / drawn[n][name]:.3f}", f"{first.cache_bytes / 1e6:.2f}")
            rows.append((f"{n:,} {name}", *figures, f"{ratio:.1f}x", f"{slowdown:.2f}"))
        rows += [(f"{n:,} {name}", "does not fit", *[""] * 4) for name in configs.keys() - times.keys()]
    head = ("drawing", "ms per step", "pictures/s", "MB per candidate", "sparse is", "x minimum step")
    print(render_table(head, rows), flush=True)
    if batch := options.batch:

        def train(name: str) -> float:
            return throughput.time_training(configs[name], batch, device, checkpointing=options.checkpointing)

        times = _measure_rounds(f"training, a step of {batch:,}", options.rounds, train)
        trained = {name: median(times[name]) / batch for name in times}
        share = median(throughput.utilization(config, batch, seconds, machine) for seconds in times["sparse"])
        dense = "does not fit into memory"
        if "dense" in times:
            ratio = median(dense / sparse for dense, sparse in zip(times["dense"], times["sparse"], strict=True))
            dense = f"{median(times['dense']) * 1e3:,.0f} ms, sparse is {ratio:.1f}x"
        print(
            f"training, a step of {batch}: sparse {median(times['sparse']) * 1e3:,.0f} ms, dense {dense}; "
            f"{share:.0%} of the measured product rate"
        )
    return {"grid": h, "drawn": drawn, "trained": trained}


def _measure_rounds(title: str, rounds: int, measure: Callable[[str], Any]) -> dict[str, list[Any]]:
    """Return measurements of sparse and dense attention in alternation; of sparse alone if dense does not fit."""
    import torch

    times: dict[str, list[Any]] = {"sparse": [], "dense": []}
    with progress(title, 2 * rounds, unit="timing") as bar:
        for name in ("sparse", "dense") * rounds:
            try:
                if name in times:
                    times[name].append(measure(name))
            except torch.OutOfMemoryError:
                if name == "sparse":
                    raise
                del times[name]
                torch.cuda.empty_cache()
            bar.advance()
    return times


def _plot(options: BenchOptions, results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot seconds per picture over candidates, and seconds per picture and training sample over the grid's side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    max_candidates = max(options.candidates)
    for name, color in (("sparse", "tab:blue"), ("dense", "tab:gray")):
        for result, line in zip(results, ["-", "--", *[":"] * len(results)], strict=False):
            grid = f"{result['grid']} x {result['grid']}"
            values = [result["drawn"][n].get(name, nan) for n in options.candidates]
            left.loglog(options.candidates, values, line, marker="o", color=color, label=f"{name}, {grid}")
        sides = [result["grid"] for result in results]
        values = [result["drawn"][max_candidates].get(name, nan) for result in results]
        right.loglog(sides, values, marker="o", color=color, label=f"{name}, drawing")
        if options.batch:
            values = [result["trained"].get(name, nan) for result in results]
            right.loglog(sides, values, "--", marker="s", color=color, label=f"{name}, training")
    left.set(xlabel="candidates of one caption", ylabel="seconds per picture", title=f"drawing, size {options.size}")
    right.set(xlabel="side of the grid", ylabel="seconds", title=f"a picture of {max_candidates}; a training sample")
    for axes, ticks in ((left, options.candidates), (right, sides)):
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    figure.savefig(path, dpi=110)
