"""`limner plan`: estimates of memory, time and traffic to train a recipe's prior, and the launch command.

No GPU is needed. The tables describe the paper's layout on machines; `RUNS` states what limner runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from limner import recipes
from limner.cli import choose
from limner.cli.arguments import parse
from limner.cli.plan_report import gb, launches, tried
from limner.profiling import cost
from limner.profiling.compression import compression_rate, table1, table2
from limner.profiling.cost import GB, Cost
from limner.profiling.gpus import GPUS
from limner.profiling.launch import moment_bytes
from limner.profiling.launch_search import Cluster, enumerate_launches
from limner.text_table import figures
from limner.validation import Checked, Range

RUNS = """\
What limner runs today: training on one GPU, or by torchrun on many, with parameters sharded over some of them
(--parallel sharded; with zero2 they are whole between forward and backward pass), replicas of these, and gradients
between replicas averaged as they are or compressed by PowerSGD.
Weights and gradients are fp32, products of matrices bf16 (fp16 where a GPU has no bf16), checkpointed or not; moments
of AdamW16 are in the paper's 16-bit formats. With --prior.training.precision fp16weights, which dalle-3b and larger
ones have, the matrices of the blocks are in 16 bits, and their gradients, too: that is the column "16-bit (App. D)",
and all else "fp32", each with a "checkpointed" one beside it and a copy of the parameters in each machine. The launches
are calculated for what the recipe has."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Checked):
    """Estimate parameters, memory, FLOPs, communication and time of a recipe's prior on a cluster.

    The tables describe the paper's layout, the launches what `torchrun` can start, with the best command.
    """

    recipe: str = "dalle-12b"
    """Name of a recipe."""
    gpus: Annotated[int, Range(1, 10**7)] = 1_024
    """Number of GPUs."""
    gpu: str = "v100-16gb"
    """One of v100-16gb, a100-80gb, h100-80gb, h200-141gb."""
    batch: Annotated[int | None, Range(1, 2**20)] = None
    """Samples per step, over all GPUs; the recipe's by default."""
    per_machine: Annotated[int, Range(1, 10**5)] = 8
    """GPUs per machine; a machine's copy of the parameters is sharded over them."""
    rank: Annotated[int | None, Range(1, 10**6)] = None
    """Rank of PowerSGD over all shards; the paper's by default (Table 1)."""
    link: Annotated[float | None, Range(1e-3, 1e9)] = None
    """Bandwidth between machines in Mbit/s; by default typical for the GPU."""
    replicas: Annotated[int | None, Range(1, 10**7)] = None
    """Replicas of the sharded parameters; the fastest number that fits by default."""
    trial: bool = False
    """Also dry-run the launch in this process, on tensors without values: seconds for a small model, minutes for the
    largest."""
    candidates: Annotated[int, Range(1, 10**6)] = 512
    """Candidates of one caption, for the memory of sampling."""


def main(argv: Sequence[str]) -> None:
    """Print estimates, launches and the best command."""
    options = parse(PlanOptions, argv, "limner plan")
    choose(options.gpu, list(GPUS), "GPU")
    recipe = recipes.get(options.recipe)
    training = recipe.prior.training
    batch = training.batch_size if options.batch is None else options.batch
    made = Cost(
        config=recipe.prior.model,
        gpu=options.gpu,
        gpus=options.gpus,
        per_machine=options.per_machine,
        batch=batch,
        rank=options.rank,
        half_moments=moment_bytes(training.optimizer)[0] < 8,
    )
    cluster = Cluster(
        gpu=options.gpu,
        per_machine=made.m,
        link=None if options.link is None else options.link * 1e6 / 8,
    )
    settings = replace(training, batch_size=batch)
    found = enumerate_launches(made.config, settings, options.gpus, cluster, options.replicas, options.rank)
    blocks = [*report(options.recipe, made, training.steps, options.candidates)]
    blocks += launches(found, options.recipe, training)
    if options.trial:
        from limner.profiling.dry_run import dry_run

        blocks += tried(found[0], dry_run(found[0].launch))
    print("\n\n".join([*blocks, RUNS]))


def report(name: str, made: Cost, steps: int, candidates: int) -> Iterable[str]:
    """Yield the tables of the paper's layout as blocks of text."""
    c, gpu = made.config, GPUS[made.gpu]
    h, w = c.grid
    yield (
        f"{name}: {c.depth} layers, {c.heads} heads of {c.width // c.heads}, width {c.width:,}; {c.text_len} text and "
        f"{h} x {w} image tokens\n{made.gpus:,} x {made.gpu}, {made.m} per machine, {made.samples} "
        f"sample{'s' * (made.samples > 1)} per GPU"
    )
    counts = cost.count_parameters(c)
    yield figures(
        ("parameters", ""),
        [(kind, f"{n:,}") for kind, n in counts.items()]
        + [("all", f"{counts.total():,}"), ("effective, 12 n_layer d_model^2", f"{made.effective_parameters:,}")],
    )

    cases = [(half, saved) for half in (False, True) for saved in (False, True)]
    parts = [
        {**made.state(half), **made.activations(saved, half), "one layer at work": made.workspace}
        for half, saved in cases
    ]
    rows = [
        (part, *(gb(found[part]) if part in found else "" for found in parts))
        for part in dict.fromkeys(part for found in parts for part in found)
    ]
    peaks = [made.memory(half, saved) for half, saved in cases]
    verdicts = ("fits" if peak <= gpu.memory else "too large" for peak in peaks)
    yield figures(
        (f"memory per GPU, GB of {gpu.memory / GB:.1f}", "fp32", "checkpointed", "16-bit (App. D)", "checkpointed"),
        [*rows, ("peak", *map(gb, peaks)), ("", *verdicts)],
    )

    prefix, each = made.kv_cache()
    dense = made.kv_cache(dense=True)[1]
    yield figures(
        ("cache when sampling", "MB"),
        [
            ("a caption's text, shared", f"{prefix / 1e6:,.1f}"),
            ("each candidate", f"{each / 1e6:,.1f}"),
            ("each candidate, dense", f"{dense / 1e6:,.1f}"),
            (f"a caption with {candidates} candidates", f"{(prefix + candidates * each) / 1e6:,.1f}"),
            ("the same, dense", f"{candidates * dense / 1e6:,.1f}"),
        ],
    )

    yield figures(
        ("per step", "", "checkpointed"),
        [
            ("PFLOP, all GPUs", *(f"{made.flops(saved) / 1e15:,.3g}" for saved in (False, True))),
            ("GB read and written per GPU", *(gb(made.memory_traffic(True, saved)) for saved in (False, True))),
        ],
    )

    yield figures(
        ("a GPU sends, GB per step", ""),
        [
            ("within its machine", gb(made.sent_within)),
            ("between machines", gb(made.sent_between(False))),
            (f"the same, compressed to rank {made.r}", gb(made.sent_between(True))),
        ],
    )
    rate = compression_rate(c.width, made.r, made.m)
    yield (
        figures(
            ("compression of a layer, values", "gradient shard", "P", "Q"),
            [(kind, *(f"{n:,.0f}" for n in row)) for kind, row in table2(c.width, made.r, made.m).items()],
        )
        + f"\nsaved: {rate:.1%} (Table 2: 1 - r (m + 2) / (2 d m))"
    )
    yield figures(
        ("Table 1: effective parameters", "d_model", "rank", "saved"),
        [(f"{n / 1e9:.2f} billion", f"{d:,}", str(r), f"{saved:.0%}") for n, d, r, saved in table1()],
    )

    times = []
    for other, kind in GPUS.items():
        took = [made.seconds(other, True, compressed) for compressed in (False, True)]
        days = (f"{t:,.2f} s, {t * steps / 86_400:,.3g} days" for t in took)
        times.append((other, f"{kind.mfu:.0%} of {kind.peak_flops / 1e12:,.0f} TFLOP/s", *days))
    yield figures((f"{steps:,} steps, checkpointed", "assumed", "uncompressed", "compressed"), times)
