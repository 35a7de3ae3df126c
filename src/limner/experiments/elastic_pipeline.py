"""PipeTransformer's ablation and numbers of micro-batches (He et al. 2021, Figures 9 and 11), simulated.

ViT-B/16 is finetuned in fp32 on 2 machines with 8 Quadro RTX 5000 each, with 400 images per pipeline and GPipe. Without
AutoDP there is one pipeline per machine. The simulator knows links, model and schedule, and has these numbers:

    measured by the paper's authors (github.com/Distributed-AI/PipeTransformer, examples/image_classification/README.md)
        a forward pass with all blocks frozen takes 471 ms for 64 images and 2,313 ms for 320; it divides by FLOPs
        DDP on 8 GPUs with 60 images each trains 416 images/s, which gives the backward pass
    fitted
        the time to launch a pass, on the six throughputs of Figure 11
        the time to read or write a cached activation, on one bar of Figure 9
    predicted
        the other bars of Figure 9

Assumptions, from the paper unless another source is named:

    An epoch T has ceil(L (1 - (1 - alpha)^T)) frozen blocks, alpha = 1/3: the rule's bound, as in the authors' code.
    The first device computes frozen blocks for all images before the first micro-batch.
    K halves by the criterion on active units; frozen units at a sixth contradict the lengths of Figure 9 (a).
    With AutoPipe, the simulator chooses M from K to 6 K. Otherwise M = 4 K (Huang et al. 2019), which gives the
    baseline's throughput of Figure 9 (a).
    AutoCache starts at 3 frozen blocks. A new depth reads the old one, computes the blocks between and writes.
    The speed-up is that of all epochs. Transitions, which take less than a minute of hours, are left out.
    Cuts are optimal (`partition`); the authors divide greedily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log
from pathlib import Path
from statistics import mean

from limner.distributed.pipeline_layout import MAX_MICROBATCHES_PER_STAGE, PipelineLayout, partition
from limner.experiments.report import Finding, experiment
from limner.planner.pipeline_schedules import gpipe
from limner.planner.pipeline_simulator import Cost, Link, Pipeline, freeze, merge, simulate

LAYERS, WIDTH, POSITIONS, CLASSES = 12, 768, 197, 1_000  # ViT-B/16 at 224 pixels
BATCH, PER_MACHINE, MACHINES, EPOCHS, ALPHA, FIRST_CACHED = 400, 8, 2, 10, 1 / 3, 3
WITHIN, BETWEEN = Link(15.754e9), Link(5e9)  # PCIe 3.0 with 16 lanes, InfiniBand
FORWARD = (2.3132 - 0.4711) / (320 - 64)  # seconds per image
DDP_GPUS, DDP_BATCH, DDP_THROUGHPUT = 8, 60, 416
#: Images/s of 2 pipelines of K = 8 with M = K, 2 K, ... (Figure 11), and the best M of each K.
FIGURE_11, BEST_MICROBATCHES = (368, 410, 386, 340, 298, 286), {8: 16, 4: 16, 2: 16}
BASELINE, FREEZE, CACHE, REPLICAS, ALL = (
    "no freezing", "freeze only", "freeze, AutoPipe, AutoCache", "freeze, AutoPipe, AutoDP", "all four parts"
)  # fmt: skip
FIGURE_9B = {FREEZE: 0.95, CACHE: 1.26, REPLICAS: 2.27, ALL: 2.83}
FITTED = ALL
#: (epoch, images/s) read from Figure 9 (a), to about 20, where the curve is visible.
FIGURE_9A = {
    BASELINE: [(0, 322), (2, 333), (4, 333), (6, 333), (8, 322), (9, 311)],
    FREEZE: [(1, 355), (3, 233), (4, 233), (5, 211), (6, 211), (7, 244), (8, 244), (9, 200)],
    CACHE: [(0, 378), (1, 278), (2, 278), (3, 311), (4, 400), (5, 411), (6, 589), (7, 567), (8, 1011), (9, 1000)],
    REPLICAS: [(2, 489), (3, 900), (4, 944), (5, 1833), (6, 1833), (7, 2011), (8, 2022), (9, 2011)],
    ALL: [(2, 567), (3, 1289), (4, 1622), (5, 3311), (6, 4589), (7, 4389), (8, 7278), (9, 7356)],
}
LOGGED = (6, 4, 4, 16, 564)  # frozen blocks, K, R, M and images/s in the authors' log of 2020-12-30


@dataclass(frozen=True)
class Testbed:
    """Costs of the units per image, and seconds to launch a pass."""

    units: tuple[Cost, ...]
    launch: float

    def active(self, frozen: int) -> tuple[Cost, ...]:
        """Return the units in the pipeline if `frozen` blocks, and the embeddings, are frozen."""
        return self.units[1 + 2 * frozen :] if frozen else self.units

    def frozen_forward(self, start: int, stop: int) -> float:
        """Return the seconds per image of the frozen blocks from `start` to before `stop`."""
        frozen = self.units[: len(self.units) - len(self.active(stop))]
        return sum(unit.forward for unit in frozen[len(self.units) - len(self.active(start)) :])

    def seconds(self, frozen: int, k: int, replicas: int, microbatches: int) -> float:
        """Return the time of an update of the active units."""
        active = self.active(frozen)
        boundaries = partition([unit.weights for unit in active], min(k, len(active)))
        pipeline = Pipeline(
            stages=merge(active, boundaries, BATCH / microbatches), devices=len(boundaries) - 1,
            microbatches=microbatches, schedule=gpipe, link=WITHIN, replicas=replicas, replica_link=BETWEEN,
            launch=self.launch,
        )  # fmt: skip
        return simulate(pipeline).seconds

    def best_microbatches(self, frozen: int, k: int, replicas: int, most: int = MAX_MICROBATCHES_PER_STAGE) -> int:
        """Return the fastest of K, 2 K, ... micro-batches."""
        return min((k * n for n in range(1, most + 1)), key=lambda m: self.seconds(frozen, k, replicas, m))

    @cached_property
    def limit(self) -> float:
        return PipelineLayout(stages=PER_MACHINE).largest_stage([unit.weights for unit in self.units])


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch's layout and the time of an update: `seconds`, and per image `forward` of frozen blocks and `transfers`
    of cached activations."""

    frozen: int
    stages: int
    replicas: int
    microbatches: int
    seconds: float
    forward: float
    transfers: int

    def per_image(self, transfer: float) -> float:
        """Return the seconds per image if reading or writing an activation takes `transfer` seconds."""
        return (self.seconds / BATCH + self.forward + self.transfers * transfer) / self.replicas


def vit_units() -> tuple[Cost, ...]:
    """Return the costs of ViT-B/16: embeddings, attention and MLP of each layer, final norm, head."""
    d, n = WIDTH, POSITIONS
    attention, mlp = (8 * d * d * n + 4 * n * n * d, 4 * d * d + 6 * d), (16 * d * d * n, 8 * d * d + 7 * d)
    embeddings = 2 * 16 * 16 * 3 * d * (n - 1), (16 * 16 * 3 + 1) * d + (n + 1) * d
    sizes = [embeddings, *LAYERS * (attention, mlp), (0, 2 * d), (2 * d * CLASSES, (d + 1) * CLASSES)]
    flops, parameters = (sum(column) for column in zip(*sizes, strict=True))
    reduction = 2 * (DDP_GPUS - 1) * BETWEEN.seconds(4 * parameters / DDP_GPUS)
    backward = (DDP_GPUS / DDP_THROUGHPUT) - reduction / DDP_BATCH - FORWARD
    return tuple(
        Cost(
            forward=FORWARD * work / flops, backward=max(1e-12, backward * work / flops), output=4 * n * d,
            weights=4 * count, gradients=4 * count, moments=4 * count,
        )
        for work, count in sizes
    )  # fmt: skip


def fit_launch(units: tuple[Cost, ...]) -> Testbed:
    """Return the testbed whose throughputs differ least from Figure 11, in half milliseconds per pass."""

    def error(testbed: Testbed) -> float:
        return sum(log(rate / paper) ** 2 for rate, paper in zip(figure_11(testbed), FIGURE_11, strict=True))

    return min((Testbed(units, 0.0005 * n) for n in range(15, 45)), key=error)


def figure_11(testbed: Testbed) -> list[float]:
    """Return the images/s of two pipelines of 8 devices by number of micro-batches."""
    counts = (PER_MACHINE * n for n in range(1, len(FIGURE_11) + 1))
    return [MACHINES * BATCH / testbed.seconds(0, PER_MACHINE, MACHINES, m) for m in counts]


def frozen_blocks(epoch: int) -> int:
    """Return the number of frozen blocks in an epoch."""
    return ceil(LAYERS * (1 - (1 - ALPHA) ** epoch))


def simulate_epochs(testbed: Testbed, name: str) -> list[Epoch]:
    """Return the epochs of a bar of Figure 9."""
    auto_pipe, auto_dp, auto_cache = name in (CACHE, REPLICAS, ALL), name in (REPLICAS, ALL), name in (CACHE, ALL)
    epochs, k, cached = [], PER_MACHINE, 0
    for epoch in range(EPOCHS):
        frozen = 0 if name == BASELINE else frozen_blocks(epoch)
        if auto_pipe:
            weights = [unit.weights for unit in testbed.active(frozen)]
            k = PipelineLayout(stages=k).shortened(weights, testbed.limit).stages
        replicas = MACHINES * PER_MACHINE // k if auto_dp else MACHINES
        m = testbed.best_microbatches(frozen, k, replicas) if auto_pipe else 4 * k
        transfers, computed = 0, cached
        if auto_cache and frozen >= FIRST_CACHED:
            transfers, cached = (cached > 0) + (cached != frozen), frozen
        epochs.append(
            Epoch(
                frozen=frozen, stages=k, replicas=replicas, microbatches=m, transfers=transfers,
                seconds=testbed.seconds(frozen, k, replicas, m), forward=testbed.frozen_forward(computed, frozen),
            )
        )  # fmt: skip
    return epochs


def fit_transfer(runs: dict[str, list[Epoch]]) -> float:
    """Return the seconds per cached activation with which the bar `FITTED` has its height."""
    target = total(runs[BASELINE], 0) / FIGURE_9B[FITTED] - total(runs[FITTED], 0)
    return target / sum(epoch.transfers / epoch.replicas for epoch in runs[FITTED])


def total(epochs: Sequence[Epoch], transfer: float) -> float:
    """Return the seconds per image of all epochs."""
    return sum(epoch.per_image(transfer) for epoch in epochs)


@experiment(
    "Freezing alone slows a pipeline down to 0.95x, with AutoPipe and AutoCache it is 1.26x, with AutoPipe and AutoDP "
    "2.27x, and with all four parts 2.83x as fast",
    "He et al. 2021, Figure 9",
)
def elastic_pipeline(folder: Path, quick: bool) -> Finding:
    """Fit one bar of Figure 9 and predict the other bars. The simulation takes seconds, also without `quick`."""
    testbed = fit_launch(vit_units())
    runs = {name: simulate_epochs(testbed, name) for name in FIGURE_9A}
    transfer = fit_transfer(runs)
    baseline = total(runs[BASELINE], transfer)
    speedups = {name: baseline / total(runs[name], transfer) for name in FIGURE_9B}
    errors = {name: speedups[name] / paper - 1 for name, paper in FIGURE_9B.items() if name != FITTED}
    rows = [
        (
            name, f"{FIGURE_9B[name]:.2f}", f"{speedups[name]:.2f}",
            f"predicted, {errors[name]:+.0%}" if name in errors else "fitted",
            ", ".join(str(epoch.stages) for epoch in runs[name]),
            *(f"{1 / runs[name][epoch].per_image(transfer):,.0f}" for epoch in (0, 2, 5, 9)),
        )
        for name in FIGURE_9B
    ]  # fmt: skip
    missed = [f"{name} ({speedups[name]:.2f}, not {FIGURE_9B[name]})" for name in errors if abs(errors[name]) > 0.1]
    shown = mean(y for x, y in FIGURE_9A[FREEZE] if x > 2) / mean(y for _, y in FIGURE_9A[BASELINE])
    *layout, logged = LOGGED
    update = testbed.seconds(*layout) + BATCH * testbed.frozen_forward(0, layout[0])
    return Finding(
        holds=not missed,
        verdict=f"The bar of {FITTED} is fitted. {len(errors) - len(missed)} of {len(errors)} other bars are predicted "
        f"within 10%{', but not ' * bool(missed)}{', '.join(missed)}. With frozen blocks in the stages, as in the "
        f"authors' last version, freezing alone gives {baseline / total_in_place(testbed):.2f}. In Figure 9 (a) it has "
        f"{shown:.0%} of the baseline's images/s from epoch 3 on. The authors' log has {logged} images/s with "
        f"{layout[0]} frozen blocks, K = {layout[1]} and R = {layout[2]}; simulated are "
        f"{layout[2] * BATCH / update:.0f}.",
        header=("parts", "paper", "simulated", "", "K by epoch", *(f"images/s in epoch {e}" for e in (0, 2, 5, 9))),
        rows=rows,
        curves={
            "simulated images per second, over the epoch": {
                name: [(number, 1 / epoch.per_image(transfer)) for number, epoch in enumerate(epochs)]
                for name, epochs in runs.items()
            },
            "images per second of Figure 9 (a), over the epoch": FIGURE_9A,
        },
        settings={
            "launch of a pass, ms, fitted on Figure 11": f"{1000 * testbed.launch:.1f}",
            f"cached activations, GB/s per pipeline, fitted on {FITTED}": f"{4e-9 * POSITIONS * WIDTH / transfer:.2f}",
            "frozen blocks by epoch": [frozen_blocks(epoch) for epoch in range(EPOCHS)],
            "micro-batches without AutoPipe": 4 * PER_MACHINE,
        },
    )


def total_in_place(testbed: Testbed) -> float:
    """Return the seconds per image of all epochs if frozen blocks stay in their stages, without AutoPipe."""
    updates = (
        replace(testbed, units=(*map(freeze, testbed.units[:count]), *testbed.units[count:]))
        for epoch in range(EPOCHS)
        for count in [len(testbed.units) - len(testbed.active(frozen_blocks(epoch)))]
    )
    return sum(b.seconds(0, PER_MACHINE, MACHINES, 4 * PER_MACHINE) for b in updates) / (BATCH * MACHINES)


@experiment(
    "The best number of micro-batches depends on the pipeline's length: 2 K for K = 8, 4 K for 4, 8 K for 2",
    "He et al. 2021, Figure 11",
)
def chunks(folder: Path, quick: bool) -> Finding:
    """Compare the throughputs of K = 8 with Figure 11, and the best M of each K when the pipeline first has it."""
    testbed = fit_launch(vit_units())
    rates = figure_11(testbed)
    rows: list[tuple[object, ...]] = [
        (8, MACHINES, 0, 8 * n, f"{rate:.0f}", paper)
        for n, (rate, paper) in enumerate(zip(rates, FIGURE_11, strict=True), 1)
    ]
    best = {8: testbed.best_microbatches(0, 8, MACHINES)}
    for k, frozen in ((4, frozen_blocks(2)), (2, frozen_blocks(3))):
        replicas = MACHINES * PER_MACHINE // k
        best[k] = testbed.best_microbatches(frozen, k, replicas, 8)
        for m in (k * n for n in range(1, 9)):
            seconds = testbed.seconds(frozen, k, replicas, m) / BATCH + testbed.frozen_forward(0, frozen)
            rows.append((k, replicas, frozen, m, f"{replicas / seconds:.0f}", "-"))
    worst = max(abs(rate / paper - 1) for rate, paper in zip(rates, FIGURE_11, strict=True))
    counts = range(PER_MACHINE, PER_MACHINE * len(rates) + 1, PER_MACHINE)
    return Finding(
        holds=worst <= 0.1 and best == BEST_MICROBATCHES,
        verdict=f"With one fitted number, the launch of a pass, the throughputs of K = 8 differ by at most {worst:.0%} "
        "from the paper's. The best M is "
        + ", ".join(f"{m} for K = {k} (paper: {BEST_MICROBATCHES[k]})" for k, m in best.items())
        + ". The launch time is that of K = 8, where one Python process drives eight devices.",
        header=("K", "R", "frozen blocks", "M", "simulated images/s", "paper"),
        rows=rows,
        curves={
            "images per second of K = 8, over the micro-batches": {
                "simulated": list(zip(counts, rates, strict=True)),
                "paper": list(zip(counts, map(float, FIGURE_11), strict=True)),
            }
        },
        settings={"launch of a pass, ms, fitted": f"{1000 * testbed.launch:.1f}"},
    )
