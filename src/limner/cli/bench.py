"""`limner bench`: how fast a prior draws and trains on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from tyro.conf import arg

from limner.cli import choose
from limner.cli.arguments import parse, place_png
from limner.errors import UserError, printable
from limner.sampling.generation_config import CANDIDATES
from limner.validation import Checked, Range


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Checked):
    """Time drawing and training of a prior with random weights, with the paper's sparse attention and with dense
    attention, and compare them with the machine's limits. Close other programs first."""

    size: str = "small"
    """Name of a size, tiny to dalle-12b; 256 text tokens, 8,192 image codes."""
    candidates: Annotated[tuple[int, ...], CANDIDATES] = (1, 64)
    """Numbers of candidates of one caption, drawn in one batch."""
    grids: Annotated[tuple[int, ...], Range(1, 128)] = (32,)
    """Side lengths of the image token grid."""
    batch: Annotated[int, Range(0, 2**16)] = 4
    """Samples per training step; 0 skips training."""
    checkpointing: bool = False
    """Train with activations recomputed in the backward pass."""
    compiled: bool = False
    """Draw with compiled steps; the first run compiles for half a minute per line."""
    rounds: Annotated[int, Range(1, 1_000)] = 3
    """Rounds that alternate sparse and dense; the table shows medians over rounds."""
    plot: Annotated[Path | None, arg(aliases=("-o",))] = None
    """Also plot the cost over candidates and grids as a PNG (needs matplotlib)."""


def main(argv: Sequence[str]) -> None:
    """Time drawing and training, and print a table."""
    options = parse(BenchOptions, argv, "limner bench")
    if not options.candidates or not options.grids:
        raise UserError("candidates and grids must be one number at least")
    from limner.models.transformer import SIZES

    choose(options.size, list(SIZES), "size")
    if options.plot:
        place_png(options.plot)
        _pyplot()  # raises before any measurement
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {name}")
    found = [_measured(options, replace(SIZES[options.size], grid=(side, side)), device) for side in options.grids]
    if options.plot:
        _plot(options, found)
        print(f"written: {printable(options.plot)}")


def _measured(options: BenchOptions, config: Any, device: Any) -> dict[str, Any]:
    """Print results of one grid. Return seconds per picture by candidates and attention, and per training sample."""
    from limner.profiling import throughput

    sides = {"sparse": config, "dense": replace(config, pattern="dense")}
    here = throughput.measure_rates(device)
    h, w = config.grid
    print(
        f"\n{options.size}: width {config.width}, {config.depth} layers, {config.heads} heads; {config.text_len} text "
        f"and {h} x {w} image tokens\nproduct {here.gemm / 1e12:.2f} TFLOP/s, copy {here.copy / 1e9:.1f} GB/s"
    )
    head = "drawing         ms per step  pictures/s  MB per candidate  sparse is  over its floor"
    print(f"{head}\n{'-' * len(head)}")
    drawn = {n: _drawing(options, sides, n, here, device) for n in options.candidates}
    return {"grid": h, "drawn": drawn, "trained": _training(options, sides, here, device) if options.batch else {}}


def _drawing(options: BenchOptions, sides: dict[str, Any], n: int, here: Any, device: Any) -> dict[str, float]:
    from limner.profiling import throughput

    def draw(name: str, config: Any) -> Any:
        return throughput.time_generation(config, n, device, shared=name == "sparse", compiled=options.compiled)

    rounds = _rounds(options, sides, draw)
    ratio = median(found["dense"].seconds / found["sparse"].seconds if "dense" in found else nan for found in rounds)
    took = {name: median(found[name].seconds for found in rounds) for name in rounds[0]}
    for name in sides:
        if name not in took:
            print(f"{n:6,} {name:7} does not fit into memory")
            continue
        step = median(found[name].step for found in rounds)
        line = f"{n:6,} {name:7} {step * 1e3:12.2f} {n / took[name]:11.3f} {rounds[0][name].cache_bytes / 1e6:17.2f}"
        over = f"{step / throughput.min_step_seconds(sides[name], n, here):26.2f}"
        print(line + (over if name == "sparse" else f"{ratio:10.1f}x"), flush=True)
    return {name: took[name] / n if name in took else nan for name in sides}


def _rounds(options: BenchOptions, sides: dict[str, Any], measure: Callable[[str, Any], Any]) -> list[dict[str, Any]]:
    """Return a dictionary of measurements per round, without a dense side that does not fit into memory."""
    import torch

    found: list[dict[str, Any]] = [{} for _ in range(options.rounds)]
    too_large = set()
    for some in found:
        for name, config in sides.items():
            try:
                if name not in too_large:
                    some[name] = measure(name, config)
            except torch.OutOfMemoryError:
                if name == "sparse":
                    raise
                too_large.add(name)
                torch.cuda.empty_cache()
    return found


def _training(options: BenchOptions, sides: dict[str, Any], here: Any, device: Any) -> dict[str, float]:
    from limner.profiling import throughput

    def train(name: str, config: Any) -> Any:
        return throughput.time_training(config, options.batch, device, checkpointing=options.checkpointing)

    rounds = _rounds(options, sides, train)
    took = {name: median(found.get(name, nan) for found in rounds) for name in sides}
    share = median(throughput.utilization(sides["sparse"], options.batch, found["sparse"], here) for found in rounds)
    ratio = median(found.get("dense", nan) / found["sparse"] for found in rounds)
    beside = f"{took['dense'] * 1e3:,.0f} ms, sparse is {ratio:.1f}x" if ratio == ratio else "does not fit into memory"
    print(
        f"training, a step of {options.batch}: sparse {took['sparse'] * 1e3:,.0f} ms, dense {beside}; useful "
        f"arithmetic at {share:.0%} of the product's rate"
    )
    return {name: value / options.batch for name, value in took.items()}


def _pyplot() -> Any:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError('plots need matplotlib: pip install "limner[plot]"') from None
    return pyplot


def _plot(options: BenchOptions, found: Sequence[dict[str, Any]]) -> None:
    """Plot seconds per picture over candidates, and seconds per picture and training sample over the grid's side."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    most = max(options.candidates)
    for name, color in (("sparse", "tab:blue"), ("dense", "tab:gray")):
        for part in found:
            line = ["-", "--", ":"][min(found.index(part), 2)]
            grid = f"{part['grid']} x {part['grid']}"
            values = [part["drawn"][n][name] for n in options.candidates]
            left.loglog(options.candidates, values, line, marker="o", color=color, label=f"{name}, {grid}")
        sides = [part["grid"] for part in found]
        right.loglog(sides, [p["drawn"][most][name] for p in found], marker="o", color=color, label=f"{name}, drawing")
        if options.batch:
            values = [part["trained"][name] for part in found]
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
