"""Sentences on what limits a run, each from one rule with a threshold, and with the numbers that it compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

MIN_WAIT = 0.1  # share of the step
MIN_IMBALANCE = 1.3  # ratio of computation between ranks
MIN_INPUT = 0.1  # share of the step
MIN_OTHER = 0.25  # share of the step without computation, communication and input
SHORT_WORK = {False: 50_000, True: 10_000}  # nanoseconds of an operator of the CPU, and of a kernel of the GPU
MIN_TRANSFER = 0.25  # share of the step in exposed communication without waiting
MIN_UTILIZATION = 0.5  # of a GPU
MIN_SM_EFFICIENCY = 0.6  # share of a GPU's SMs, while it computes
MIN_TENSOR_CORES = 0.5  # share of the time of matrix products
MIN_PRODUCTS = 0.2  # share of kernel time in matrix products
MAX_TENSOR = 0.4  # share of the peak that one tensor holds
MAX_ACTIVATIONS = 0.5  # share of the peak that tensors of the forward pass hold, without the largest
MIN_PEAK = 32 << 20  # bytes

Table = Mapping[str, Any]


def recommend(tables: Table) -> list[dict[str, str]]:
    """Return the kinds and texts of the recommendations for the tables of `analysis.analyze`."""
    rules = (_imbalance, _input, _small_work, _transfer, _gpus, _tensor_cores, _memory)
    return [{"kind": kind, "text": text} for rule in rules for kind, text in rule(tables)]


def format_time(nanoseconds: float) -> str:
    """Format a time: 31 µs, 3.1 ms, 31.4 s."""
    return _with_unit(nanoseconds, ("ns", "µs", "ms", "s"))


def format_size(size: float) -> str:
    """Format a size: 31 B, 3.1 kB, 314 MB."""
    return _with_unit(size, ("B", "kB", "MB", "GB"))


def _with_unit(value: float, units: Sequence[str]) -> str:
    scale = next((i for i in range(len(units)) if abs(value) < 999.5 * 1000**i), len(units) - 1)
    value /= 1000**scale
    return f"{value:,.0f} {units[scale]}" if abs(value) >= 100 else f"{value:.3g} {units[scale]}"


def _imbalance(tables: Table) -> Iterator[tuple[str, str]]:
    """Name the rank that the others wait for, and what it does meanwhile."""
    waiting = max(tables["ranks"], key=lambda row: row["waiting"])
    late = min(tables["ranks"], key=lambda row: row["waiting"])
    share = waiting["waiting"] / waiting["total"]
    if waiting is late or share < MIN_WAIT:
        return
    slow, fast = f"rank {late['rank']}", f"rank {waiting['rank']}"
    part = max(("compute", "input", "other"), key=lambda part: late[part] - waiting[part])
    more, less = late[part], waiting[part]
    ratio = (
        f"computes {more / max(less, 1):.1f} times as long as {fast}, which waits {share:.0%} of each step "
        f"({format_time(more)} and {format_time(less)} per step)"
    )
    if more - less < waiting["waiting"] / 2:  # it does not explain the wait
        return
    if part != "compute":
        doing = "loads data" if part == "input" else "neither computes, sends nor loads data"
        yield (
            "straggler",
            f"R{slow[1:]} {doing} for {format_time(more - less)} per step longer than {fast}, which waits {share:.0%} "
            "of each step: compare what the two ranks read and write, and what else runs on their machines.",
        )
    elif more < MIN_IMBALANCE * less:
        return
    elif any("recv" in row["name"].lower() for row in tables["collectives"]):
        yield "uneven-stages", f"The pipeline stage of {slow} {ratio}: move blocks from {slow} to {fast}."
    else:
        yield "straggler", f"R{slow[1:]} {ratio}: give {slow} less work, or find what else runs on its device."


def _input(tables: Table) -> Iterator[tuple[str, str]]:
    row = max(tables["ranks"], key=lambda row: row["input"] / row["total"])
    if (share := row["input"] / row["total"]) >= MIN_INPUT:
        loading = [part for part in tables["loading"] if part["rank"] == row["rank"]]
        longest = max(loading, key=lambda part: part["time"], default={"part": ""})["part"]
        yield (
            "input",
            f"Rank {row['rank']} waits for data {share:.0%} of each step ({format_time(row['input'])} of "
            f"{format_time(row['total'])}){longest and f', and threads that load data mostly {longest}'}: prepare "
            "smaller pictures with `limner data prepare`, or load them in more processes.",
        )


def _small_work(tables: Table) -> Iterator[tuple[str, str]]:
    """Compare medians over steps: a step that the system interrupts is long for another reason."""
    gpu = bool(tables["gpus"])
    for row, work in zip(tables["ranks"], tables["operator_time"], strict=True):
        steps = (step for step in tables["steps"] if step["rank"] == row["rank"])
        share = median(step["other"] / step["total"] for step in steps)
        if share >= MIN_OTHER and 0 < work < SHORT_WORK[gpu]:
            yield (
                "small-batch",
                f"Rank {row['rank']} neither computes, sends nor loads data in {share:.0%} of each step, and "
                f"{'a kernel' if gpu else 'an operator'} takes {format_time(work)} on average, so launching them "
                "limits the step: raise the batch size.",
            )
            return


def _transfer(tables: Table) -> Iterator[tuple[str, str]]:
    row = max(tables["ranks"], key=lambda row: (row["communication"] - row["waiting"]) / row["total"])
    if (share := (row["communication"] - row["waiting"]) / row["total"]) >= MIN_TRANSFER:
        size = sum(x["bytes"] for x in tables["collectives"] if x["rank"] == row["rank"]) / row["steps"]
        yield (
            "communication",
            f"Rank {row['rank']} sends for {share:.0%} of each step ({format_size(size)} per step) while it does not "
            "compute: raise the batch size or accumulate, or compress gradients (--grad-compression).",
        )


def _gpus(tables: Table) -> Iterator[tuple[str, str]]:
    if not tables["gpus"]:
        return
    row = min(tables["gpus"], key=lambda row: row["utilization"])
    if row["utilization"] < MIN_UTILIZATION:
        yield (
            "idle-gpu",
            f"The GPU of rank {row['rank']} works {row['utilization']:.0%} of each step, and a kernel takes "
            f"{format_time(row['mean_kernel'])} on average: raise the batch size, or find what the GPU waits for.",
        )
    row = min(tables["gpus"], key=lambda row: row["sms_in_use"])
    if row["sms_in_use"] < MIN_SM_EFFICIENCY:
        yield (
            "few-blocks",
            f"Kernels of rank {row['rank']} use {row['sms_in_use']:.0%} of the GPU's SMs on average, because many have "
            "fewer blocks than the GPU has SMs: raise the batch size.",
        )


def _tensor_cores(tables: Table) -> Iterator[tuple[str, str]]:
    total = sum(row["time"] for row in tables["kernels"])
    products = [row for row in tables["kernels"] if row["matrix_product"]]
    time = sum(row["time"] for row in products)
    on_cores = sum(row["time"] for row in products if row["uses_tensor_cores"]) / max(time, 1)
    if total and time / total >= MIN_PRODUCTS and on_cores < MIN_TENSOR_CORES:
        yield (
            "tensor-cores",
            f"Matrix products take {time / total:.0%} of kernel time, of which {on_cores:.0%} runs on Tensor Cores: "
            "train in 16 bits, with sizes that are multiples of 8.",
        )


def _memory(tables: Table) -> Iterator[tuple[str, str]]:
    row = max(tables["memory"], key=lambda row: row["peak"], default=None)
    if row is None or row["peak"] < MIN_PEAK:
        return
    largest, line = row["largest"], f" at {source}" if (source := row["largest"]["source"]) else ""
    peak = f"the peak of {format_size(row['peak'])} on rank {row['rank']} ({row['device']})"
    if (share := largest["bytes"] / row["peak"]) >= MAX_TENSOR:
        yield (
            "large-tensor",
            f"One tensor of {format_size(largest['bytes'])}, from {largest['operator']}{line}, is {share:.0%} of "
            f"{peak}: compute it in parts.",
        )
    forward = sum(x["bytes"] for x in row["holders"] if x["phase"] == "forward")
    if (forward - largest["bytes"] * (largest["phase"] == "forward")) / row["peak"] >= MAX_ACTIVATIONS:
        yield (
            "activations",
            f"Tensors of the forward pass hold {forward / row['peak']:.0%} of {peak}: recompute activations "
            "(checkpoint_activations), or use smaller micro-batches (accumulate).",
        )
