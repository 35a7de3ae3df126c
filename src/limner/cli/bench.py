"""`limner bench`: how fast a prior draws and trains on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from tyro.conf import arg

from limner.cli import validate_choice
from limner.cli.arguments import check_writable_png, parse
from limner.errors import UserError, escape_control
from limner.sampling.generation_config import CANDIDATES
from limner.validation import Range, Validated

_TOO_LARGE = "does not fit into memory"


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
    plot: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Also plot the cost over candidates and grids as a PNG (needs matplotlib)."""


def main(argv: Sequence[str]) -> None:
    """Time drawing and training, and print a table."""
    options = parse(BenchOptions, argv, "limner bench")
    if not options.candidates or not options.grids:
        raise UserError("--candidates and --grids need at least one number each")
    from limner.models.transformer import SIZES

    validate_choice(options.size, list(SIZES), "size")
    if options.plot:
        check_writable_png(options.plot)
        _pyplot()  # raises before any measurement
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {name}")
    size = SIZES[options.size]
    results = [_measure_grid(options, replace(size, grid=(side, side)), device) for side in options.grids]
    if options.plot:
        _plot(options, results)
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
    head = "drawing         ms per step  pictures/s  MB per candidate  sparse is  x minimum step"
    print(f"{head}\n{'-' * len(head)}")
    drawn, trained = {}, {}
    for n in options.candidates:
        draw = partial(throughput.time_generation, candidates=n, device=device, compiled=options.compiled)
        drawings = {name: partial(draw, c, shared=name == "sparse") for name, c in configs.items()}
        min_step = throughput.min_step_seconds(config, n, machine)
        drawn[n] = _print_drawing(n, _measure_rounds(options.rounds, drawings), min_step)
    if batch := options.batch:
        train = partial(throughput.time_training, batch=batch, device=device, checkpointing=options.checkpointing)
        times = _measure_rounds(options.rounds, {name: partial(train, c) for name, c in configs.items()})
        seconds = {name: median(times.get(name, [nan])) for name in configs}
        share = median(throughput.utilization(config, batch, step, machine) for step in times["sparse"])
        dense = f"{seconds['dense'] * 1e3:,.0f} ms, sparse is {_ratio(times):.1f}x"
        print(
            f"training, a step of {batch}: sparse {seconds['sparse'] * 1e3:,.0f} ms, dense "
            f"{dense if 'dense' in times else _TOO_LARGE}; {share:.0%} of the measured product rate"
        )
        trained = {name: value / batch for name, value in seconds.items()}
    return {"grid": h, "drawn": drawn, "trained": trained}


def _print_drawing(n: int, times: dict[str, list[Any]], min_step: float) -> dict[str, float]:
    """Print a line per attention; return seconds per picture."""
    seconds = {name: [each.seconds for each in times.get(name, [])] or [nan] for name in ("sparse", "dense")}
    for name, whole in seconds.items():
        if name not in times:
            print(f"{n:6,} {name:7} {_TOO_LARGE}")
            continue
        step, cache = median(each.step for each in times[name]), times[name][0].cache_bytes / 1e6
        comparison = f"{step / min_step:26.2f}" if name == "sparse" else f"{_ratio(seconds):10.1f}x"
        print(f"{n:6,} {name:7} {step * 1e3:12.2f} {n / median(whole):11.3f} {cache:17.2f}{comparison}", flush=True)
    return {name: median(whole) / n for name, whole in seconds.items()}


def _ratio(seconds: dict[str, list[float]]) -> float:
    """Return the median over rounds of the speedup of sparse attention; NaN without dense attention."""
    return median(dense / sparse for dense, sparse in zip(seconds.get("dense", [nan]), seconds["sparse"], strict=False))


def _measure_rounds(rounds: int, functions: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """Return a result per round by attention, without dense attention if that does not fit into memory."""
    import torch

    results: dict[str, list[Any]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in list(results):
            try:
                results[name].append(functions[name]())
            except torch.OutOfMemoryError:
                if name == "sparse":
                    raise
                del results[name]
                torch.cuda.empty_cache()
    return results


def _pyplot() -> Any:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError('plots need matplotlib: run pip install "limner[plot]"') from None
    return pyplot


def _plot(options: BenchOptions, results: Sequence[dict[str, Any]]) -> None:
    """Plot seconds per picture over candidates, and seconds per picture and training sample over the grid's side."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    most, sides = max(options.candidates), [result["grid"] for result in results]
    for name, color in (("sparse", "tab:blue"), ("dense", "tab:gray")):
        for result, line in zip(results, ["-", "--", *[":"] * len(results)], strict=False):
            values, label = [result["drawn"][n][name] for n in options.candidates], f"{name}, {result['grid']} x "
            left.loglog(options.candidates, values, line, marker="o", color=color, label=f"{label}{result['grid']}")
        values = [result["drawn"][most][name] for result in results]
        right.loglog(sides, values, marker="o", color=color, label=f"{name}, drawing")
        if options.batch:
            values = [result["trained"][name] for result in results]
            right.loglog(sides, values, "--", marker="s", color=color, label=f"{name}, training")
    left.set(xlabel="candidates of one caption", ylabel="seconds per picture", title=f"drawing, size {options.size}")
    right.set(xlabel="side of the grid", ylabel="seconds", title=f"a picture of {most}; a training sample")
    for axes, ticks in ((left, options.candidates), (right, sides)):
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    figure.savefig(options.plot, dpi=110)
    pyplot.close(figure)
