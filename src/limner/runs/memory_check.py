"""Check before training that a step fits into memory, since systems end a process without a word when it does not.

Only the tensors that the forward pass saves are counted, in the autograd graphs of one and two samples; weights,
gradients, averages and temporary tensors come on top. So a stage that fails the check cannot train on this machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from limner.errors import UserError
from limner.planner.saved_tensors import TrainingStep
from limner.recipes.recipe import STAGE_TITLES, AnyStage, ResolvedRecipe
from limner.runs.time_estimate import flops_per_sample

__all__ = ["check_memory", "saved_bytes"]

_MAX_FLOPS = 2e12  # FLOPs per sample of a training step; the forward passes of the check take seconds


def check_memory(recipe: ResolvedRecipe, stages: Sequence[str]) -> None:
    """Raise `UserError` if a step of a stage saves more bytes for the backward pass than the device has.

    Stages too large to run for a check are left out.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    total = torch.cuda.get_device_properties(device).total_memory if cuda else _physical_memory()
    for name, stage in recipe.stages.items():
        if name not in stages or flops_per_sample(recipe, name) > _MAX_FLOPS:
            continue
        samples = math.ceil(stage.training.batch_size / stage.training.accumulate)
        one, two = (saved_bytes(recipe, name, stage, n, device) for n in (1, 2))
        if (needed := one + (samples - 1) * (two - one)) > total:
            fitting = max(1, int(total / 2 / (two - one)))
            accumulate = math.ceil(stage.training.batch_size / fitting)
            raise UserError(
                f"{samples} samples of the {STAGE_TITLES[name]} need more than {needed / 1e9:,.0f} GB of memory, and "
                f"this device has {total / 1e9:,.0f} GB: divide the batch by --{name}.training.accumulate {accumulate}"
            )


def saved_bytes(recipe: ResolvedRecipe, name: str, stage: AnyStage, samples: int, device: torch.device) -> int:
    """Return the bytes of activations that a stage saves for a micro-batch of `samples`."""
    return TrainingStep(
        model=recipe.models[name], objective=stage.objective, training=stage.training, samples=samples, device=device,
        distractors=getattr(stage, "distractors", 0),
    ).graph().nbytes("activation")  # fmt: skip


def _physical_memory() -> float:
    """Return the bytes of this machine's memory; infinite if the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf
