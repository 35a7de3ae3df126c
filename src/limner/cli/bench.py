"""`limner bench`: how fast a prior draws and trains on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import median
from typing import Annotated, Any

from tyro.conf import arg

from limner.cli import validate_choice
from limner.cli.arguments import OutputPNG, parse
from limner.errors import UserError, escape_control
from limner.sampling.generation_config import CANDIDATES
from limner.validation import Range, Validated

_Configs = dict[str, Any]  # of the prior, "sparse" and "dense"


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
    if options.plot:
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
    drawn = {n: _time_drawing(options, configs, n, machine, device) for n in options.candidates}
    trained = _time_training(options, configs, machine, device) if options.batch else {}
    return {"grid": h, "drawn": drawn, "trained": trained}


def _time_drawing(options: BenchOptions, configs: _Configs, n: int, machine: Any, device: Any) -> dict[str, float]:
    from limner.planner import throughput

    def draw(name: str, config: Any) -> Any:
        return throughput.time_generation(config, n, device, shared=name == "sparse", compiled=options.compiled)

    rounds = _measure_rounds(options, configs, draw)
    ratio = median(times["dense"].seconds / times["sparse"].seconds if "dense" in times else nan for times in rounds)
    seconds = {name: median(times[name].seconds for times in rounds) for name in rounds[0]}
    for name in configs:
        if name not in seconds:
            print(f"{n:6,} {name:7} does not fit into memory")
            continue
        step = median(times[name].step for times in rounds)
        line = f"{n:6,} {name:7} {step * 1e3:12.2f} {n / seconds[name]:11.3f} {rounds[0][name].cache_bytes / 1e6:17.2f}"
        slowdown = f"{step / throughput.min_step_seconds(configs[name], n, machine):26.2f}"
        print(line + (slowdown if name == "sparse" else f"{ratio:10.1f}x"), flush=True)
    return {name: seconds[name] / n if name in seconds else nan for name in configs}


def _measure_rounds(options: BenchOptions, configs: _Configs, measure: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return a dictionary of measurements per round, without dense attention if that does not fit into memory."""
    import torch

    rounds: list[dict[str, Any]] = [{} for _ in range(options.rounds)]
    too_large = set()
    for measurements in rounds:
        for name, config in configs.items():
            try:
                if name not in too_large:
                    measurements[name] = measure(name, config)
            except torch.OutOfMemoryError:
                if name == "sparse":
                    raise
                too_large.add(name)
                torch.cuda.empty_cache()
    return rounds


def _time_training(options: BenchOptions, configs: _Configs, machine: Any, device: Any) -> dict[str, float]:
    from limner.planner import throughput

    def train(name: str, config: Any) -> Any:
        return throughput.time_training(config, options.batch, device, checkpointing=options.checkpointing)

    rounds = _measure_rounds(options, configs, train)
    seconds = {name: median(times.get(name, nan) for times in rounds) for name in configs}
    config, batch = configs["sparse"], options.batch
    share = median(throughput.utilization(config, batch, times["sparse"], machine) for times in rounds)
    ratio = median(times.get("dense", nan) / times["sparse"] for times in rounds)
    times = f"{seconds['dense'] * 1e3:,.0f} ms, sparse is {ratio:.1f}x"
    dense = times if ratio == ratio else "does not fit into memory"
    print(
        f"training, a step of {options.batch}: sparse {seconds['sparse'] * 1e3:,.0f} ms, dense {dense}; "
        f"{share:.0%} of the measured product rate"
    )
    return {name: value / options.batch for name, value in seconds.items()}


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
    max_candidates = max(options.candidates)
    for name, color in (("sparse", "tab:blue"), ("dense", "tab:gray")):
        for result, line in zip(results, ["-", "--", *[":"] * len(results)], strict=False):
            grid = f"{result['grid']} x {result['grid']}"
            values = [result["drawn"][n][name] for n in options.candidates]
            left.loglog(options.candidates, values, line, marker="o", color=color, label=f"{name}, {grid}")
        sides = [result["grid"] for result in results]
        values = [result["drawn"][max_candidates][name] for result in results]
        right.loglog(sides, values, marker="o", color=color, label=f"{name}, drawing")
        if options.batch:
            values = [result["trained"][name] for result in results]
            right.loglog(sides, values, "--", marker="s", color=color, label=f"{name}, training")
    left.set(xlabel="candidates of one caption", ylabel="seconds per picture", title=f"drawing, size {options.size}")
    right.set(xlabel="side of the grid", ylabel="seconds", title=f"a picture of {max_candidates}; a training sample")
    for axes, ticks in ((left, options.candidates), (right, sides)):
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    figure.savefig(options.plot, dpi=110)
    pyplot.close(figure)
