"""The contents of a checkpoint: saving and restoring the state of a run.

Tensors in groups:

    model       parameters and persistent buffers, by name
    ema         averaged parameters, if the run averages
    optimizer   "exp_avg.NAME", "exp_avg_sq.NAME", "step.NAME" for each parameter (AdamW)
    rng         states of the random generators as bytes; names for rank 2 end in ".2"
    parallel    state of the parallel strategy, the same on all ranks, e.g. the mean of error buffers
    errors.N    error buffers of gradient compression of replica N, by parameter (few replicas)
    hook.NAME   tensors in the state of the hook of that name; "KEY.PARAMETER" for each parameter

Other values are JSON: step, data position, schedule, counters, hooks, config, versions.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from limner.errors import UserError
from limner.numerics.seeding import fold_in
from limner.optim.dtensor import shard_like, to_local
from limner.training.checkpoint import Checkpointer, Tensors, fill_model, model_tensors
from limner.training.config import check_resumable
from limner.training.dcp_reader import replica_groups
from limner.training.hooks import Hook
from limner.training.train_module import Batch
from limner.training.train_state import TrainState
from limner.version import __version__


class Batches(Protocol):
    """An endless iterator over batches, whose state is its position, in JSON values."""

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


def save(
    run: TrainState, stream: Batches, hooks: Sequence[Hook], description: Mapping[str, Any], checkpointer: Checkpointer
) -> Path:
    """Save the complete state of a run; return the path. Each rank passes its shards of sharded tensors to the
    checkpointer.

    Raises `Diverged` if a tensor is not finite on any rank, `UserError` if weights differ between ranks that must hold
    the same ones.
    """
    run.parallel.assert_replicas_equal(run.parameters)
    for hook in hooks:
        hook.before_save(run)
    states = {hook.name: state for hook in hooks if (state := hook.state_dict())}
    tensors = {
        "model": model_tensors(run.model),
        "optimizer": optimizer_tensors(run.model, run.optimizers),
        "rng": _generators(run),
        "ema": run.ema.state_dict() if run.ema else {},
        "parallel": run.parallel.reduction.state_dict(),
        "errors": run.parallel.reduction.error_buffers(),
    }
    for name, state in states.items():
        tensors[f"hook.{name}"] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    values = (t for group in tensors.values() for t in group.values() if not t.is_meta)
    numbers = (to_local(t) for t in values if t.is_floating_point())
    if run.parallel.any(not all(x.isfinite().all() for x in numbers)):
        raise run.diverged()
    state = {
        "step": run.step,
        "initial_loss": run.initial_loss,
        "skipped": run.skipped,
        "consecutive_bad_steps": run.consecutive_bad_steps,
        "seconds": run.seconds + time.monotonic() - run.started,
        "parts": {"stream": stream.state_dict(), "schedule": run.schedule.state_dict()},
        "hooks": {h: {k: v for k, v in state.items() if not isinstance(v, Tensor)} for h, state in states.items()},
        "config": description,
        "environment": _environment(run),
    }
    return checkpointer.save(run.step, {name: group for name, group in tensors.items() if group}, state)


def restore(
    run: TrainState, stream: Batches, hooks: Sequence[Hook], description: Mapping[str, Any], checkpointer: Checkpointer
) -> Path | None:
    """Restore the newest state; return its path, or None before the first. `description` has all configs by name, as
    `config.description` returns them. Raises `UserError` if the state does not fit the run."""
    checkpointer.acquire()
    checkpoint = checkpointer.latest()
    if checkpoint is None:
        return None
    tensors, state = checkpointer.load(checkpoint, run.model)
    try:
        check_resumable(checkpoint, state["config"], description)
        if state["environment"] != _environment(run):
            environment = ", ".join(state["environment"].values())
            warnings.warn(f"{checkpoint} was written by {environment}: results may differ", stacklevel=3)
        _load(run, stream, hooks, tensors, state, str(checkpoint))
        _load_parallel(run, tensors.get("parallel", {}), checkpointer, checkpoint)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{checkpoint} does not fit this run: {error!r}") from error
    return checkpoint


def _load(
    run: TrainState, stream: Batches, hooks: Sequence[Hook], tensors: Tensors, state: Mapping[str, Any], where: str
) -> None:
    fill_model(run.model, tensors["model"], where)
    load_optimizers(run.model, run.optimizers, tensors.get("optimizer", {}), where)  # {} if all updates were skipped
    if run.ema:
        run.ema.load_state_dict(tensors["ema"])
    stream.load_state_dict(state["parts"]["stream"])
    run.schedule.load_state_dict(state["parts"]["schedule"])
    for hook in hooks:
        if hook.name in state["hooks"]:
            hook.load_state_dict({**state["hooks"][hook.name], **tensors.get(f"hook.{hook.name}", {})})
    _load_generators(run, tensors["rng"], state["step"], same_device=state["environment"]["device"] == run.device.type)
    run.step, run.skipped = int(state["step"]), int(state["skipped"])
    run.consecutive_bad_steps, run.seconds = int(state["consecutive_bad_steps"]), float(state["seconds"])
    run.initial_loss = None if state["initial_loss"] is None else float(state["initial_loss"])


def optimizer_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the state of the optimizers as "KEY.PARAMETER" -> tensor."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    states = (entry for optimizer in optimizers for entry in optimizer.state.items())
    return {f"{key}.{names[p]}": value for p, state in states for key, value in state.items()}


def load_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor], where: str
) -> None:
    """Load the result of `optimizer_tensors`, except learning rates and decay. Raises `UserError` on a mismatch."""
    parameters = dict(model.named_parameters())
    owner = {
        p: (optimizer, i)
        for optimizer in optimizers
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    states: dict[torch.optim.Optimizer, dict[int, dict[str, Tensor]]] = {optimizer: {} for optimizer in optimizers}
    for entry, tensor in tensors.items():
        key, _, name = entry.partition(".")
        p = parameters.get(name)
        if p is not None and p.is_meta:  # of another stage of a pipeline
            continue
        if p is None or p not in owner or (tensor.ndim and tensor.shape != p.shape):
            raise UserError(f"the optimizer state {entry!r} in {where} does not fit the model")
        optimizer, i = owner[p]
        if tensor.ndim:  # in the parameter's own layout: fused kernels ignore strides
            tensor = torch.empty_like(p, dtype=tensor.dtype).copy_(shard_like(tensor, p))
        states[optimizer].setdefault(i, {})[key] = tensor
    for optimizer, state in states.items():
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _load_parallel(run: TrainState, tensors: Mapping[str, Tensor], checkpointer: Checkpointer, where: Path) -> None:
    reduction = run.parallel.reduction
    reduction.load_state_dict(tensors, checkpointer.error_buffers(where, run.model))
    names = set(tensors).union(*replica_groups(where).values())
    errors = names & dict(run.model.named_parameters()).keys()
    if errors and (lost := errors - reduction.state_dict().keys() - reduction.error_buffers().keys()):
        warnings.warn(
            f"the run drops the error buffers of {len(lost)} matrices in {where}, because it does not compress their "
            "gradients: to keep them, resume with the same --grad-compression and several replicas",
            stacklevel=4,
        )


def _generators(run: TrainState) -> dict[str, Tensor]:
    """Return the states of the generators of all ranks."""
    states = {"torch": torch.get_rng_state(), "objective": run.generator.get_state()}
    if run.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(run.device)
    gathered = {name: run.parallel.all_gather(value) for name, value in states.items()}
    return {_rank_key(name, rank): value for name, values in gathered.items() for rank, value in enumerate(values)}


def _load_generators(run: TrainState, rng: Mapping[str, Tensor], step: int, same_device: bool) -> None:
    """Restore the generators of this rank. A generator without a saved state (of a new rank or another device) is
    seeded for this step, so that it does not repeat the numbers of the first steps."""
    rank = run.parallel.rank
    seed = fold_in(run.config.seed, rank, step)
    torch.manual_seed(seed)
    run.generator.manual_seed(seed)
    if rank and _rank_key("torch", rank) not in rng:
        return
    torch.set_rng_state(rng[_rank_key("torch", rank)])
    if same_device:  # formats differ between devices
        run.generator.set_state(rng[_rank_key("objective", rank)])
        if run.device.type == "cuda":
            torch.cuda.set_rng_state(rng[_rank_key("cuda", rank)], run.device)


def _rank_key(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name


def _environment(run: TrainState) -> dict[str, str]:
    """Return properties that may change the last bits of a result but are not settings."""
    ranks = {"ranks": f"{run.parallel.world_size} ranks"} if run.parallel.world_size > 1 else {}
    compression = {"grad_compression": summary} if (summary := run.parallel.reduction.summary()) else {}
    return {
        "limner": f"limner {__version__}",
        "torch": f"torch {torch.__version__}",
        "device": run.device.type,
        "precision": str(run.config.precision.dtype(run.device)).removeprefix("torch."),
        **ranks,
        **compression,
    }
