"""The contents of a checkpoint: saving and restoring the state of a run.

Tensors in groups:

    model       parameters and persistent buffers, by name
    ema         averaged parameters, if the run averages
    optimizer   "exp_avg.NAME", "exp_avg_sq.NAME", "step.NAME" for each parameter (AdamW)
    rng         states of the random generators as bytes; names for rank 2 end in ".2"
    parallel    state of the parallel strategy, the same on all ranks, e.g. the mean of error buffers
    errors.N    error buffers of gradient compression of replica N, by parameter (few replicas)
    hook.NAME   tensors in the state of the hook of that name

Other values are JSON: step, data position, schedule, counters, hooks, config, versions.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from limner.errors import UserError
from limner.optim.dtensor import to_local
from limner.training.checkpoint import Checkpointer, Tensors
from limner.training.config import refuse_changes
from limner.training.dcp_reader import replica_groups
from limner.training.hooks import Hook
from limner.training.parallel import folded
from limner.training.state_tensors import fill_model, load_optimizers, model_tensors, optimizer_tensors
from limner.training.train_state import Run
from limner.version import __version__


class Stateful(Protocol):
    """An object whose state consists of JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


def save(
    run: Run, stream: Stateful, hooks: Sequence[Hook], description: Mapping[str, Any], checkpointer: Checkpointer
) -> Path:
    """Save the complete state of a run; return the path. Each rank passes its shards of sharded tensors to the
    checkpointer.

    Raises `Diverged` if a tensor is not finite on any rank, `UserError` if weights differ between ranks that must hold
    the same ones.
    """
    run.parallel.check(run.parameters)
    for hook in hooks:
        hook.on_save(run)
    states = {hook.name: state for hook in hooks if (state := hook.state_dict())}
    tensors = {
        "model": model_tensors(run.model),
        "optimizer": optimizer_tensors(run.model, run.optimizers),
        "rng": _generators(run),
        "ema": run.ema.state_dict() if run.ema else {},
        "parallel": run.parallel.tensors(),
        "errors": run.parallel.errors(),
    }
    for name, state in states.items():
        tensors[f"hook.{name}"] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    numbers = (to_local(t) for group in tensors.values() for t in group.values() if t.is_floating_point())
    if run.parallel.any(not all(x.isfinite().all() for x in numbers)):
        raise run.diverged()
    state = {
        "step": run.step,
        "first": run.first,
        "skipped": run.skipped,
        "bad": run.bad,
        "seconds": run.seconds + time.monotonic() - run.started,
        "parts": {"stream": stream.state_dict(), "schedule": run.schedule.state_dict()},
        "hooks": {h: {k: v for k, v in state.items() if not isinstance(v, Tensor)} for h, state in states.items()},
        "config": description,
        "made_with": _made_with(run),
    }
    return checkpointer.save(run.step, {name: group for name, group in tensors.items() if group}, state)


def restore(
    run: Run, stream: Stateful, hooks: Sequence[Hook], parts: Mapping[str, Any], checkpointer: Checkpointer
) -> Path | None:
    """Restore the newest state; return its path, or None before the first. `parts` describes the run: configs and JSON
    values by name. Raises `UserError` if the state does not fit the run."""
    checkpointer.begin()
    found = checkpointer.latest()
    if found is None:
        return None
    tensors, state = checkpointer.load(found, run.model)
    try:
        refuse_changes(found, state["config"], parts)
        if state["made_with"] != _made_with(run):
            made_with = ", ".join(state["made_with"].values())
            warnings.warn(f"{found} was made with {made_with}: results may differ", stacklevel=3)
        _load(run, stream, hooks, tensors, state, str(found))
        _load_parallel(run, tensors.get("parallel", {}), checkpointer, found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{found} is no checkpoint of such a run: {error!r}") from error
    return found


def _load(
    run: Run, stream: Stateful, hooks: Sequence[Hook], tensors: Tensors, state: Mapping[str, Any], where: str
) -> None:
    fill_model(run.model, tensors["model"], where)
    load_optimizers(run.model, run.optimizers, tensors["optimizer"], where)
    if run.ema:
        run.ema.load_state_dict(tensors["ema"])
    stream.load_state_dict(state["parts"]["stream"])
    run.schedule.load_state_dict(state["parts"]["schedule"])
    for hook in hooks:
        if hook.name in state.get("hooks", {}):
            hook.load_state_dict({**state["hooks"][hook.name], **tensors.get(f"hook.{hook.name}", {})})
    _load_generators(run, tensors["rng"], state["step"], same_device=state["made_with"]["device"] == run.device.type)
    run.step, run.skipped, run.bad = (int(state[key]) for key in ("step", "skipped", "bad"))
    run.first, run.seconds = None if state["first"] is None else float(state["first"]), float(state["seconds"])


def _load_parallel(run: Run, kept: Mapping[str, Tensor], checkpointer: Checkpointer, where: Path) -> None:
    run.parallel.load(kept, checkpointer.errors(where, run.model))
    names = set(kept).union(*replica_groups(where).values())
    errors = names & dict(run.model.named_parameters()).keys()
    if errors and (lost := errors - run.parallel.tensors().keys() - run.parallel.errors().keys()):
        warnings.warn(
            f"{where} holds what compression has left out of the gradients of {len(lost)} matrices, and they are not "
            "compressed any more: it is lost; to keep it go on with the same --reduce, and with several replicas",
            stacklevel=4,
        )


def _generators(run: Run) -> dict[str, Tensor]:
    """Return the states of the generators of all ranks."""
    own = {"torch": torch.get_rng_state(), "objective": run.generator.get_state()}
    if run.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(run.device)
    everyone = {name: run.parallel.gather(value) for name, value in own.items()}
    return {_of(name, rank): value for name, values in everyone.items() for rank, value in enumerate(values)}


def _load_generators(run: Run, rng: Mapping[str, Tensor], step: int, same_device: bool) -> None:
    """Restore the generators of this rank. A generator without a saved state (of a new rank or another device) is
    seeded for this step, so that it does not repeat the numbers of the first steps."""
    rank = run.parallel.rank
    seed = folded(run.config.seed, rank, step)
    torch.manual_seed(seed)
    run.generator.manual_seed(seed)
    if rank and _of("torch", rank) not in rng:
        return
    torch.set_rng_state(rng[_of("torch", rank)])
    if same_device:  # formats differ between devices
        run.generator.set_state(rng[_of("objective", rank)])
        if run.device.type == "cuda":
            torch.cuda.set_rng_state(rng[_of("cuda", rank)], run.device)


def _of(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name


def _made_with(run: Run) -> dict[str, str]:
    """Return properties that may change the last bits of a result but are not settings."""
    ranks = {"ranks": f"{run.parallel.world} ranks"} if run.parallel.world > 1 else {}
    reduced = {"reduced": told} if (told := run.parallel.describe()) else {}
    return {
        "limner": f"limner {__version__}",
        "torch": f"torch {torch.__version__}",
        "device": run.device.type,
        "precision": str(run.config.precision.dtype(run.device)).removeprefix("torch."),
        **ranks,
        **reduced,
    }
