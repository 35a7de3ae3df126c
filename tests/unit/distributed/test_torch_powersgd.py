"""torch's PowerSGD as a reducer: the hook's updates, and what the hook alone does not do."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from limner.data.stream import Stream
from limner.distributed.gradient_reducers import Replicas, buckets
from limner.distributed.overlapped_reducer import OverlappedReducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded
from limner.distributed.torch_powersgd import TorchPowerSGD
from limner.errors import UserError
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.training.config import TrainConfig
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.train_module import Trainable
from limner.training.train_state import TrainState
from ranks import on_ranks
from shard_ranks import Tokens

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")
STEPS = 7


def numbers(step: int, rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + rank))


class Layer(nn.Module):
    """A matrix that is compressed, and a bias that is not."""

    def __init__(self, rows: int = 12, columns: int = 20) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(columns, rows)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def gradients(hooked: bool, kept: dict[str, Tensor] | None = None, first: int = 0, steps: int = STEPS) -> Any:
    """Return the gradients of weight and bias in each step, by DDP and its hook or by the reducer, and its state."""
    model, rank = Layer(), distributed.get_rank()
    reducer, called = TorchPowerSGD(3), model
    if hooked:
        called = DistributedDataParallel(model)
        # The seed that the reducer draws the first Q from is the number of updates until then.
        state = PowerSGDState(None, 3, start_powerSGD_iter=2, min_compression_rate=1, random_seed=2)
        called.register_comm_hook(state, powerSGD_hook)  # type: ignore[operator]
    else:
        reduction = OverlappedReducer(reducer, buckets(model), Replicas(distributed.group.WORLD))  # type: ignore[arg-type]
        reducer.load_state_dict(kept or {})
    found = []
    for step in range(first, first + steps):
        model.zero_grad()
        (called(numbers(step, rank, 4, 20)) * numbers(step, rank + 5, 4, 12)).sum().backward()
        if not hooked:
            reduction.complete()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found, {} if hooked else reducer.state_dict() | reduction.mean_error_buffers()


def both() -> tuple[Any, ...]:
    """Gradients by the hook, by the reducer, and by a reducer that resumes after four steps."""
    _, kept = gradients(False, steps=4)
    return gradients(True), gradients(False), gradients(False, kept, 4, STEPS - 4), kept


@pytest.fixture(scope="module")
def measured() -> list[Any]:
    return on_ranks(2, both)


def test_gradients_are_those_of_ddp_with_torchs_hook(measured: list[Any]) -> None:
    for (theirs, _), (ours, _), _, _ in measured:
        for step in range(STEPS):
            for a, b in zip(theirs[step], ours[step], strict=True):
                torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    mean = sum(step[0] for step in measured[0][1][0])
    assert not torch.allclose(sum(step[0] for step in measured[0][1][0][2:]), mean, rtol=0.1)


def test_residuals_are_sent_later_also_after_a_checkpoint(measured: list[Any]) -> None:
    plain = [
        torch.stack([numbers(s, r + 5, 4, 12).T @ numbers(s, r, 4, 20) for r in range(2)]).mean(0) for s in range(STEPS)
    ]
    for _, (ours, kept), (went_on, kept_on), half in measured:
        assert set(kept) == {"blocks.0.weight", "/Q", "/updates"} and int(kept["/updates"]) == STEPS
        assert (ours[3][0] - plain[3]).norm() > 0.1 * plain[3].norm() and half["blocks.0.weight"].norm() > 0
        torch.testing.assert_close(sum(g[0] for g in ours) + kept["blocks.0.weight"], sum(plain), rtol=0, atol=1e-4)
        for a, b in zip(went_on, ours[4:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kept_on, kept, rtol=1e-3, atol=1e-3)
        assert all(torch.equal(kept[name], measured[0][1][1][name]) for name in kept)


def spoiled(value: float, scale: float = 1.0) -> dict[str, Any]:
    """Steps of two matrices, in the fourth of which one's gradient is not finite in the second process, or too large to
    be multiplied; and what comes of an update that is left out."""
    rank = distributed.get_rank()
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(20, 12, bias=False) for _ in range(2)])
    reducer = TorchPowerSGD(3)
    reduction = OverlappedReducer(reducer, buckets(model), Replicas(distributed.group.WORLD))  # type: ignore[arg-type]
    first, second = (block.weight for block in model.blocks)
    found, sums = [], torch.zeros(2, 12, 20)
    for step in range(8):
        model.zero_grad()
        values = [numbers(step, rank + 2 * i, 12, 20) for i in range(2)]
        if step == 4:
            values[0] = values[0] * scale
            values[0][1, 2] += value if rank else 0
        sums += torch.stack(values)
        sum((p * x).sum() for p, x in zip((first, second), values, strict=True)).backward()  # type: ignore[union-attr]
        reduction.complete()
        found.append([first.grad.clone(), second.grad.clone()])
        if step == 5:
            reducer.restore_error_feedback([second])
            found[-1][1].zero_()
    return {"found": found, "kept": reduction.mean_error_buffers(), "sums": sums}


def all_spoiled() -> list[dict[str, Any]]:
    return [spoiled(float("nan")), spoiled(float("inf")), spoiled(0.0, 1e38)]


def test_a_matrix_with_values_that_are_not_finite_is_left_out_alone_and_loses_nothing() -> None:
    ranks = on_ranks(2, all_spoiled)
    for case in range(3):
        results = [rank[case] for rank in ranks]
        for result in results:
            for step, (first, second) in enumerate(result["found"]):
                assert not first.isfinite().any() if step == 4 else first.isfinite().all()
                assert second.isfinite().all()
                assert torch.equal(second, results[0]["found"][step][1])
            given = sum(second for _, second in result["found"]) + result["kept"]["blocks.1.weight"]
            should = torch.stack([r["sums"][1] for r in results]).mean(0)
            torch.testing.assert_close(given, should, rtol=0, atol=1e-4)
            if case < 2:
                given = sum(x for step, (x, _) in enumerate(result["found"]) if step != 4)
                steps = [step for step in range(8) if step != 4]
                mean = torch.stack([numbers(s, r, 12, 20) for s in steps for r in range(2)]).sum(0) / 2
                torch.testing.assert_close(given + result["kept"]["blocks.0.weight"], mean, rtol=0, atol=1e-4)


PRIOR = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=2, heads=2, kernel=3)


def learn(out: Path, steps: int, kind: str) -> list[tuple[float, float]]:
    make = {"torch": partial(TorchPowerSGD, 4), "ours": partial(PowerSGD, PowerSGDConfig(quantize=False)), "none": None}
    config = TrainConfig(
        steps=steps,
        batch_size=8,
        optimizer=AdamWConfig(lr=0.01, eps=1e-2),
        precision=Fp32(),
        log_every=1,
        checkpoint_every=5,
    )
    torch.manual_seed(0)
    stream = Stream(Tokens(), 8, seed=3)
    parallel = Replicated(make[kind])
    train(TrainState(PRIOR.build(), Autoregressive(), config, parallel=parallel), stream, out)
    stream.close()
    return [(row["loss"], row["grad_norm"]) for row in read_metrics(out / "metrics.jsonl")]


def runs(out: Path) -> tuple[Any, ...]:
    """Losses of a run, of a resumed run, and of a run resumed with our PowerSGD."""
    whole = learn(out / "whole", 10, "torch")
    learn(out / "parts", 5, "torch")
    learn(out / "ours", 5, "torch")
    return whole, learn(out / "parts", 10, "torch"), learn(out / "ours", 10, "ours")


def test_a_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    for whole, parts, ours in on_ranks(2, runs, tmp_path):
        assert whole[:5] == parts[:5] == ours[:5]
        assert whole == parts
        assert ours[5:] != parts[5:]


def refused() -> list[str]:
    found = []
    for parallel in (Sharded(1, TorchPowerSGD), Replicated(partial(TorchPowerSGD, 64))):
        trainable = Trainable(PRIOR.build(), Autoregressive())
        with pytest.raises(UserError) as caught:
            parallel.prepare(trainable, torch.device("cpu"), torch.float32)
        found.append(str(caught.value))
    return found


def test_shards_and_ranks_that_save_nothing_are_refused() -> None:
    for shards, rank in on_ranks(2, refused):
        assert "each process holds all weights" in shards and "--grad-compression powersgd" in shards
        assert "factors of rank 64" in rank
