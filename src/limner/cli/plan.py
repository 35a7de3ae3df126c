"""`limner plan`: estimates of memory, time and traffic to train a recipe's prior, and the launch command.

No GPU is needed. The tables describe the paper's layout on machines; `RUNS` states what limner runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from tyro.conf import arg

from limner import recipes
from limner.cli import validate_choice
from limner.cli.arguments import parse
from limner.cli.plan_report import dry_run_report, gb, launches
from limner.planner import cost
from limner.planner.compression import compression_rate, table1, table2
from limner.planner.cost import GB, Cost
from limner.planner.gpus import GPUS
from limner.planner.launch import moment_bytes
from limner.planner.launch_search import Cluster, enumerate_launches
from limner.text_table import render_table
from limner.validation import Range, Validated

RUNS = """\
limner trains on one GPU, or with torchrun on many. There it shards parameters over groups of GPUs (--parallel fsdp;
with zero2, parameters are unsharded between forward and backward pass), and averages gradients between the replicas,
in fp32 or compressed by PowerSGD.
The columns "fp32": weights and gradients in fp32, matrix products in bf16, or fp16 on GPUs without bf16. The columns
"16-bit (App. D)": --prior.training.precision fp16weights, the default from dalle-3b on, stores the matrices of the
blocks and their gradients in 16 bits. "checkpointed" recomputes activations. Each machine holds one copy of the
parameters. AdamW16 stores moments in the paper's 16-bit formats. The launches use the settings of the recipe."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Validated):
    """Estimate parameters, memory, FLOPs, communication and time of a recipe's prior on a cluster.

    The tables describe the paper's layout, the launches what `torchrun` can start, with the best command.
    """

    recipe: Annotated[str, arg(metavar="NAME")] = "dalle-12b"
    """Name of a recipe."""
    gpus: Annotated[int, Range(1, 10**7)] = 1_024
    """Number of GPUs."""
    gpu: Annotated[str, arg(metavar="NAME")] = "v100-16gb"
    """One of v100-16gb, a100-80gb, h100-80gb, h200-141gb."""
    batch: Annotated[int | None, Range(1, 2**20)] = None
    """Samples per step, over all GPUs; the recipe's by default."""
    per_machine: Annotated[int, Range(1, 10**5)] = 8
    """GPUs per machine; a machine's copy of the parameters is sharded over them."""
    rank: Annotated[int | None, Range(1, 10**6)] = None
    """Rank of PowerSGD over all shards; the paper's by default (Table 1)."""
    link: Annotated[float | None, Range(1e-3, 1e9)] = None
    """Bandwidth between machines in Mbit/s; by default typical for the GPU."""
    dp_replicate: Annotated[int | None, Range(1, 10**7)] = None
    """Replicas of the sharded parameters; the fastest number that fits by default."""
    dry_run: bool = False
    """Also run a step of the launch in this process on meta tensors: seconds for a small model, minutes for the
    largest."""
    candidates: Annotated[int, Range(1, 10**6)] = 512
    """Candidates of one caption, for the memory of sampling."""


def main(argv: Sequence[str]) -> None:
    """Print estimates, launches and the best command."""
    options = parse(PlanOptions, argv, "limner plan")
    validate_choice(options.gpu, list(GPUS), "GPU")
    recipe = recipes.get(options.recipe)
    training = recipe.prior.training
    batch = training.batch_size if options.batch is None else options.batch
    cost_model = Cost(
        config=recipe.prior.model, gpu=options.gpu, gpus=options.gpus, per_machine=options.per_machine, batch=batch,
        rank=options.rank, half_moments=moment_bytes(training.optimizer)[0] < 8,
    )  # fmt: skip
    cluster = Cluster(
        gpu=options.gpu,
        per_machine=cost_model.m,
        link=None if options.link is None else options.link * 1e6 / 8,
    )
    settings = replace(training, batch_size=batch)
    estimates = enumerate_launches(
        cost_model.config, settings, options.gpus, cluster, options.dp_replicate, options.rank
    )
    blocks = [*report(options.recipe, cost_model, training.steps, options.candidates)]
    blocks += launches(estimates, options.recipe, recipe.prior)
    if options.dry_run:
        from limner.planner.dry_run import dry_run

        blocks += dry_run_report(estimates[0], dry_run(estimates[0].launch))
    print("\n\n".join([*blocks, RUNS]))


def report(name: str, cost_model: Cost, steps: int, candidates: int) -> Iterable[str]:
    """Yield the tables of the paper's layout as blocks of text."""
    c, gpu = cost_model.config, GPUS[cost_model.gpu]
    h, w = c.grid
    yield (
        f"{name}: {c.depth} layers, {c.heads} heads of {c.width // c.heads}, width {c.width:,}; {c.text_len} text and "
        f"{h} x {w} image tokens\n{cost_model.gpus:,} x {cost_model.gpu}, {cost_model.m} per machine, "
        f"{cost_model.samples} sample{'s' * (cost_model.samples > 1)} per GPU"
    )
    counts = cost.count_parameters(c)
    yield render_table(
        ("parameters", ""),
        [(kind, f"{n:,}") for kind, n in counts.items()]
        + [("all", f"{counts.total():,}"), ("effective, 12 n_layer d_model^2", f"{cost_model.effective_parameters:,}")],
    )

    cases = [(half, saved) for half in (False, True) for saved in (False, True)]
    parts = [
        {**cost_model.state(half), **cost_model.activations(saved, half), "one layer at work": cost_model.workspace}
        for half, saved in cases
    ]
    rows = [
        (name, *(gb(sizes[name]) if name in sizes else "" for sizes in parts))
        for name in dict.fromkeys(name for sizes in parts for name in sizes)
    ]
    peaks = [cost_model.memory(half, saved) for half, saved in cases]
    verdicts = ("fits" if peak <= gpu.memory else "too large" for peak in peaks)
    yield render_table(
        (f"memory per GPU, GB of {gpu.memory / GB:.1f}", "fp32", "checkpointed", "16-bit (App. D)", "checkpointed"),
        [*rows, ("peak", *map(gb, peaks)), ("", *verdicts)],
    )

    prefix, candidate = cost_model.kv_cache()
    dense = cost_model.kv_cache(dense=True)[1]
    yield render_table(
        ("cache when sampling", "MB"),
        [
            ("a caption's text, shared", f"{prefix / 1e6:,.1f}"),
            ("each candidate", f"{candidate / 1e6:,.1f}"),
            ("each candidate, dense", f"{dense / 1e6:,.1f}"),
            (f"a caption with {candidates} candidates", f"{(prefix + candidates * candidate) / 1e6:,.1f}"),
            ("the same, dense", f"{candidates * dense / 1e6:,.1f}"),
        ],
    )

    yield render_table(
        ("per step", "", "checkpointed"),
        [
            ("PFLOP, all GPUs", *(f"{cost_model.flops(saved) / 1e15:,.3g}" for saved in (False, True))),
            ("GB read and written per GPU", *(gb(cost_model.memory_traffic(True, saved)) for saved in (False, True))),
        ],
    )

    yield render_table(
        ("a GPU sends, GB per step", ""),
        [
            ("within its machine", gb(cost_model.sent_within)),
            ("between machines", gb(cost_model.sent_between(False))),
            (f"the same, compressed to rank {cost_model.r}", gb(cost_model.sent_between(True))),
        ],
    )
    rate = compression_rate(c.width, cost_model.r, cost_model.m)
    yield (
        render_table(
            ("compression of a layer, values", "gradient shard", "P", "Q"),
            [(kind, *(f"{n:,.0f}" for n in row)) for kind, row in table2(c.width, cost_model.r, cost_model.m).items()],
        )
        + f"\nsaved: {rate:.1%} (Table 2: 1 - r (m + 2) / (2 d m))"
    )
    yield render_table(
        ("Table 1: effective parameters", "d_model", "rank", "saved"),
        [(f"{n / 1e9:.2f} billion", f"{d:,}", str(r), f"{saved:.0%}") for n, d, r, saved in table1()],
    )

    times = []
    for name, kind in GPUS.items():
        seconds = [cost_model.seconds(name, True, compressed) for compressed in (False, True)]
        days = (f"{t:,.2f} s, {t * steps / 86_400:,.3g} days" for t in seconds)
        times.append((name, f"{kind.mfu:.0%} of {kind.peak_flops / 1e12:,.0f} TFLOP/s", *days))
    yield render_table((f"{steps:,} steps, checkpointed", "assumed", "uncompressed", "compressed"), times)
