"""Error feedback over skipped and partly skipped updates: no part of a finite gradient is lost."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.dtensor import full_tensor
from limner.optim.optimizers import AdamWConfig
from limner.training.config import TrainConfig
from limner.training.grad_scaler import scaling
from limner.training.hooks import Hook
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import left_out, on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")

PRIOR = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=2, heads=2)
STEPS = 6
SPOILED = {  # whose gradient is not finite in process 1, by step
    1: ("blocks.0.mlp.branch.down", "weight", torch.nan),
    2: ("head.norm", "weight", torch.inf),
    4: ("blocks.1.attention.norm", "bias", -torch.inf),  # no matrix: those of its block are finite
}
BUCKET = "blocks.0.mlp."  # whose matrices lack finite gradients in step 1
SCALINGS = ("none", "resblocks", "tensors")


class Spoiled(torch.autograd.Function):
    """Identity; one number of the gradient of `p` is `value`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(p)
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        wrong = torch.zeros_like(ctx.saved_tensors[0])
        wrong.view(-1)[0] = ctx.value
        return upstream[0], wrong, None


class Gradients(Hook):
    """An optimizer that records its gradients."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def after_backward(self, run: TrainState) -> None:
        names = run.model.named_parameters()
        self.steps.append({name: full_tensor(p.grad).clone() for name, p in names if p.grad is not None})

    def after_update(self, run: TrainState) -> None:
        if not torch.tensor(run.norm).isfinite():
            self.steps[-1] = {}


def learn(parallel: Parallel, kind: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the gradients applied in each step, and the error buffers at the end; weights hardly change."""
    torch.manual_seed(0)
    config = TrainConfig(
        steps=STEPS, batch_size=8, precision=Fp32(), optimizer=AdamWConfig(lr=1e-12), clip_norm=None, scaling=kind
    )
    run = TrainState(PRIOR.build(), Autoregressive(), config, parallel=parallel)
    hooks = [*scaling(run), applied := Gradients()]
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        batch = {"text": torch.randint(0, 20, (8, 8), generator=g), "image": torch.randint(0, 8, (8, 9), generator=g)}
        handles = []
        if step in SPOILED and parallel.rank == 1:
            path, name, value = SPOILED[step]

            def spoil(module: nn.Module, _: Any, out: Tensor, name: str = name, value: float = value) -> Tensor:
                return Spoiled.apply(out, getattr(module, name), value)  # type: ignore[no-any-return]

            handles = [run.model.get_submodule(path).register_forward_hook(spoil)]
        update(run, {name: x.chunk(parallel.world_size)[parallel.rank] for name, x in batch.items()}, hooks)
        for handle in handles:
            handle.remove()
    return applied.steps, left_out(parallel)


def all_of(shards: int) -> dict[str, Any]:
    make = partial(PowerSGD, PowerSGDConfig(rank=8, quantize=False))
    return {kind: learn(Sharded(2, make) if shards > 1 else Replicated(make), kind) for kind in SCALINGS}


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "shards"])
def measured(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    return request.param, on_ranks(2 * request.param, all_of, request.param)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALINGS)
def test_what_is_applied_and_what_is_kept_are_the_gradients(measured, kind):
    shards, found = measured
    steps, kept = found[kind]
    true, _ = learn(SingleProcess(), "none")
    skipped = {"none": {1, 2, 4}, "resblocks": {2}, "tensors": set()}[kind]
    assert {step for step, gradients in enumerate(steps) if not gradients} == skipped
    for name in kept:
        applied = sum(step[name] for step in steps if name in step)
        should = sum(step[name] for step in true)
        if name.startswith(BUCKET):
            if shards > 1:
                continue  # a shard is finite, another is not
            should = should - true[1][name]
        assert (applied + kept[name] - should).norm() < 1e-5 * should.norm(), name
