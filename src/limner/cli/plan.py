"""`limner plan`: estimates of memory, time and traffic to train a recipe's prior, and the launch command.

No GPU is needed. The tables describe the paper's layout on machines; `RUNS` states what limner runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from tyro.conf import arg

from limner import recipes
from limner.cli import validate_choice
from limner.cli.arguments import parse
from limner.cli.plan_report import dry_run_report, launches, paper_report
from limner.planner.cost import moment_bytes
from limner.planner.launch_search import GPUS, Cluster, enumerate_launches
from limner.planner.paper_layout import PaperLayout, default_rank
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
    model, training = recipe.prior.model, recipe.prior.training
    asked = training if options.batch is None else replace(training, batch_size=options.batch)
    layout = PaperLayout(
        config=model,
        gpus=options.gpus,
        per_machine=options.per_machine,
        batch=asked.batch_size,
        rank=default_rank(model.width) if options.rank is None else options.rank,
        half_moments=moment_bytes(training.optimizer)[0] < 8,
    )
    link = None if options.link is None else options.link * 1e6 / 8
    cluster = Cluster(gpu=options.gpu, per_machine=layout.shards, link=link)
    estimates = enumerate_launches(model, asked, options.gpus, cluster, options.dp_replicate, options.rank)
    blocks = [
        *paper_report(options.recipe, layout, options.gpu, training.steps, options.candidates),
        *launches(estimates, cluster, options.recipe, training),
    ]
    if options.dry_run:
        from limner.planner.dry_run import dry_run

        launch = replace(estimates[0].launch, rank=None)
        blocks += dry_run_report(launch, dry_run(launch))
    print("\n\n".join([*blocks, RUNS]))
