"""`limner train DATA --recipe NAME --out RUN`: train a recipe; options override its settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from limner import recipes
from limner.cli.arguments import NewFolder, check_writable, parse, pop_option
from limner.config import load_json
from limner.distributed import process_group
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.replicated import ReducerFactory
from limner.distributed.torch_powersgd import TorchPowerSGD
from limner.errors import UserError, escape_control
from limner.profiling.recording import FOLDER, ProfileRecorder, parse_steps
from limner.profiling.url import path_or_url
from limner.recipes.recipe import PretrainedDVAE, Recipe, ResolvedRecipe, Stage
from limner.runs import memory_check, time_estimate
from limner.runs.stages import StageHooks
from limner.runs.train import train_all
from limner.training.determinism import deterministic
from limner.training.hooks import Hook
from limner.training.nonfinite import NonfiniteReport
from limner.validation import Range, Validated


def _recipe_help() -> str:
    lines = [f"{name}: {about}." for name, about in recipes.SUMMARIES.items()]
    return "\n".join(["Name of a recipe, or a recipe.json of an earlier run; its settings are options:", *lines])


@dataclass(frozen=True, kw_only=True)
class Train(Validated):
    """Train on image-caption data: a folder of pictures with .txt captions, JSONL, CSV or Parquet, or tar shards.

    The same command resumes after an interruption. The result is a bundle: `limner draw --model RUN`. With
    `--dvae.bundle FOLDER`, a recipe uses the dVAE of a bundle, or one from `limner convert`, instead of training one.
    """

    data: Positional[str]
    """A folder, a file or a glob (in quotes)."""
    out: Annotated[NewFolder, arg(metavar="FOLDER")]
    """Folder of the run."""
    recipe: Annotated[str, arg(help=_recipe_help(), metavar="NAME|FILE")]
    stages: tuple[Stage, ...] = ()
    """Stages to train; all by default."""
    parallel: process_group.Kind = "ddp"
    """State in each process of torchrun: all of it (ddp), a shard of it (fsdp), all weights and a
    shard of gradients, averages and moments (zero2), or that of some blocks of the prior (pipeline)."""
    dp_replicate: Annotated[int | process_group.PerNode, Range(1, 2**16)] = 1
    """Number of process groups that each hold all weights, for fsdp and zero2; per-node makes each machine a group,
    also after a machine is lost or added."""
    pipeline_stages: Annotated[int | None, Range(1, 2**16)] = None
    """Number of processes that together hold all blocks of the prior, for pipeline; all processes by default."""
    pipeline_schedule: process_group.PipelineSchedule = "1f1b"
    """Order of the micro-batches, for pipeline: 1f1b stores the activations of few micro-batches, gpipe of all;
    interleaved gives each process two parts of the model, and waits less."""
    pipeline_search: bool = False
    """Time the first updates with K to 6K micro-batches, for pipelines of K processes, and keep the fastest number;
    2K without a search. The choice depends on time, so repeated runs may round differently."""
    deterministic: bool = False
    """Train reproducibly: the same command gives the same weights. Slower on GPUs; stages are trained one by one."""
    debug_nonfinite: bool = False
    """Stop at the first update whose loss or gradient is not finite, and name the operation and module that cause it.
    Such updates are skipped otherwise. Stages are trained one by one."""
    grad_compression: Literal[tuple(process_group.REDUCERS)] = "recipe"  # pyright: ignore[reportInvalidTypeForm]
    """Format of gradients sent between replicas: the recipe's (--prior.grad-compression-rank), fp32 (none), bf16, or
    PowerSGD factors of the paper or of torch."""
    grad_compression_rank: Annotated[int | None, Range(1, 2**16), arg(name="grad-compression.rank")] = None
    """Rank of the PowerSGD factors over all shards of a matrix; by default an eighth of its smaller side, for torch's
    32."""
    profile: Annotated[str | None, arg(metavar="FIRST:LAST")] = None
    """Record the updates between two steps of each stage, such as 10:13, in RUN/STAGE/profile for `limner profile`.
    Stages are trained one by one."""
    profile_out: Annotated[str | None, arg(metavar="FOLDER|URL")] = None
    """Write the traces to FOLDER/STAGE instead; also a URL such as s3://bucket/run, which all machines reach."""
    profile_stacks: bool = False
    """Also record Python calls, so that the report names source lines. Slower."""
    settings: Annotated[Recipe, arg(name="")]


def main(argv: Sequence[str]) -> None:
    """Train the stages of a recipe; its settings are options."""
    settings = find_recipe(pop_option("--recipe", argv)[0])
    if settings is None and not {"-h", "--help"} & set(argv):
        raise UserError(f"limner train needs --recipe NAME: choose {', '.join(recipes.SUMMARIES)}")
    required: Any = tyro.MISSING
    settings = _with_pretrained_dvae(settings or recipes.get("scenes"), argv)
    default = Train(data=required, out=required, recipe=required, settings=settings)
    options = parse(Train, argv, "limner train", default)
    dvae, prior, settings = options.settings.dvae, options.settings.prior, options.settings
    if options.grad_compression != "recipe":
        settings = replace(settings, prior=replace(prior, grad_compression_rank=None))
    if isinstance(dvae, PretrainedDVAE) and "dvae" in options.stages:
        raise UserError(f"the recipe uses the trained dVAE of {dvae.bundle!r}: leave dvae out of --stages")

    def announce(resolved: ResolvedRecipe, stages: Sequence[str]) -> None:
        if "WORLD_SIZE" not in os.environ:  # an error of one process leaves the others waiting
            memory_check.check_memory(resolved, stages)
        time_estimate.print_estimate(resolved, options.out, stages, recipes.fallback_recipe(options.recipe))

    stage_hooks = _stage_hooks(options)
    if options.deterministic and options.pipeline_search:
        raise UserError("--pipeline-search chooses by measured times: omit it, or --deterministic")
    joined = process_group.join_process_group(
        options.parallel, options.dp_replicate, _reducer(options), options.pipeline_stages, options.pipeline_schedule,
        options.pipeline_search,
    )  # fmt: skip
    with deterministic(options.deterministic), joined as parallel:
        if options.debug_nonfinite and parallel:
            raise UserError("--debug-nonfinite repeats a step in one process: run the command without torchrun")
        bundle = train_all(settings, options.data, options.out, options.stages or None, announce, parallel, stage_hooks)
    if process_group.rank():
        return
    print(f"run: {escape_control(options.out)}")
    if bundle is not None:
        print(f'draw with its bundle: limner draw "..." --model {escape_control(options.out)}')


def _stage_hooks(options: Train) -> StageHooks | None:
    """Return what makes the hooks that the options ask for; None without any, so that stages may train in parallel."""
    makers = list[Callable[[Path], Hook]]()
    if options.debug_nonfinite:
        makers.append(lambda folder: NonfiniteReport())
    if options.profile is not None:
        first, last = parse_steps(options.profile)
        out = None if options.profile_out is None else path_or_url(options.profile_out)
        out = check_writable(out, "folder") if isinstance(out, Path) else out

        def recorder(folder: Path) -> ProfileRecorder:
            return ProfileRecorder(out / folder.name if out else folder / FOLDER, first, last, options.profile_stacks)

        makers.append(recorder)
    elif options.profile_stacks or options.profile_out is not None:
        raise UserError("--profile-stacks and --profile-out need --profile, such as --profile 10:13")
    return (lambda folder: [make(folder) for make in makers]) if makers else None


def _reducer(options: Train) -> ReducerFactory | None:
    rank = options.grad_compression_rank
    if rank is None:
        return process_group.REDUCERS[options.grad_compression]
    if options.grad_compression == "powersgd":
        return partial(PowerSGD, PowerSGDConfig(rank=rank))
    if options.grad_compression == "torch-powersgd":
        return partial(TorchPowerSGD, rank)
    raise UserError(
        f"--grad-compression.rank needs --grad-compression powersgd or torch-powersgd, not {options.grad_compression}"
    )


def find_recipe(name: str | None) -> Recipe | None:
    """Return the recipe of a name or a JSON file; None for None. Raises `UserError`."""
    if name is None:
        return None
    return load_json(Recipe, name) if name.endswith(".json") else recipes.get(name)


def _with_pretrained_dvae(recipe: Recipe, argv: Sequence[str]) -> Recipe:
    """Return the recipe, with a pretrained dVAE if `argv` names one. Raises `UserError` if it also trains one."""
    names = [word.partition("=")[0] for word in argv]
    if "--dvae.bundle" not in names or isinstance(recipe.dvae, PretrainedDVAE):
        return recipe
    for name in names:
        other_variant = name == "--dvae" and pop_option(name, argv)[0] != PretrainedDVAE.__name__
        if other_variant or (name.startswith("--dvae.") and name != "--dvae.bundle"):
            raise UserError(f"{name} configures a new dVAE, --dvae.bundle loads a trained one: give one of the two")
    return replace(recipe, dvae=PretrainedDVAE())
