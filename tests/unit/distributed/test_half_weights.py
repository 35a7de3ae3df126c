"""Weights of blocks stored in fp16, in several processes: each way to divide the work learns what one process does."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from limner.data.stream import Stream
from limner.distributed.gradient_reducers import Fp32Reducer, Replicas, buckets
from limner.distributed.overlapped_reducer import OverlappedReducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.replicated import Replicated
from limner.distributed.sharded import Sharded, Zero2
from limner.distributed.torch_powersgd import TorchPowerSGD
from limner.models.transformer import TransformerConfig
from limner.objectives.autoregressive import Autoregressive
from limner.optim import grad_access
from limner.optim.dtensor import full_tensor, to_local
from limner.optim.optimizers import AdamW16Config
from limner.quantization import HalfLinear
from limner.quantization.precisions import Fp16Weights
from limner.training.config import TrainConfig
from limner.training.grad_scaler import scaling
from limner.training.loop import train
from limner.training.metrics_log import read_metrics
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_module import Trainable
from limner.training.train_state import TrainState
from ranks import on_ranks
from shard_ranks import Tokens

PRIOR = TransformerConfig(text_vocab=20, image_vocab=8, text_len=8, grid=(3, 3), width=32, depth=2, heads=2, kernel=3)
CONFIG = TrainConfig(
    steps=4, batch_size=8, precision=Fp16Weights(), scaling="resblocks", optimizer=AdamW16Config(lr=1e-3),
    clip_norm=0.5, log_every=1, checkpoint_every=2, ema_decay=0.9,
)  # fmt: skip
WAYS = {
    "replicated": Replicated,
    "reduced": lambda: Replicated(Fp32Reducer),
    "compressed": lambda: Replicated(lambda: PowerSGD(PowerSGDConfig(rank=4))),
    "sharded": Sharded,
    "zero2": Zero2,
    "replicas": lambda: Sharded(2),
}


def learn(ours: Parallel, config: TrainConfig = CONFIG) -> dict[str, Any]:
    torch.manual_seed(0)
    with ours.init_context():
        prior = PRIOR.build()
    run = TrainState(prior, Autoregressive(), config, parallel=ours)
    hooks, generator, losses = scaling(run), torch.Generator().manual_seed(0), []
    for _ in range(config.steps):
        text, image = (torch.randint(0, n, (8, m), generator=generator) for n, m in ((20, 8), (8, 9)))
        mine = {"text": text.chunk(ours.world_size)[ours.rank], "image": image.chunk(ours.world_size)[ours.rank]}
        update(run, mine, hooks)
        losses.append((run.loss, run.norm))
    ours.assert_replicas_equal(run.parameters)
    return {
        "losses": losses,
        "bytes": sum(to_local(p).nbytes for p in run.parameters),
        "dtypes": {name: p.dtype for name, p in run.model.named_parameters()},
        "biases": [
            full_tensor(p.detach()).clone() for name, p in run.model.named_parameters() if name.endswith("bias")
        ],
    }


def each_way() -> dict[tuple[str, int], dict[str, Any]]:
    again = replace(CONFIG, accumulate=2, checkpoint_activations=True)
    return {(name, c.accumulate): learn(make(), c) for name, make in WAYS.items() for c in (CONFIG, again)}


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, int], dict[str, Any]]]:
    return on_ranks(2, each_way, seconds=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("parts", [1, 2])
def test_shards_learn_as_one_process(found, name, parts):
    """Losses and lengths of gradients, but for sums in other orders and what compression leaves out."""
    alone = learn(SingleProcess())
    exact = torch.tensor(alone["losses"])
    for rank in found:
        close = {"rtol": 3e-2} if name == "compressed" else {"rtol": 3e-4}
        assert torch.allclose(torch.tensor(rank[name, parts]["losses"]), exact, atol=1e-6, **close)
    assert all(torch.equal(*pair) for pair in zip(*(rank[name, parts]["biases"] for rank in found), strict=True))


def test_matrices_stay_in_16_bits_and_each_process_of_shards_has_half(found):
    alone = learn(SingleProcess())
    for rank in found:
        for (name, _), one in rank.items():
            for key, dtype in one["dtypes"].items():
                matrix = key.startswith("blocks.") and key.endswith("weight") and "norm" not in key
                assert dtype == (torch.float16 if matrix else torch.float32), key
            if name in ("sharded", "zero2"):
                biases = 2 * (3 + 1 + 4 + 1) * 32 * 4  # of which each has all
                assert one["bytes"] == (alone["bytes"] + biases) / 2
            else:
                assert one["bytes"] == alone["bytes"]


REDUCERS: dict[str, Callable[[], Fp32Reducer]] = {
    "powersgd": lambda: PowerSGD(PowerSGDConfig(rank=3, quantize=False)),
    "torch-powersgd": lambda: TorchPowerSGD(3),
}


def all_compressed() -> dict[tuple[str, torch.dtype, float], tuple[Tensor, ...]]:
    """Return by reducer, format and size the gradients that a matrix gets, its error buffers, and this process's
    gradients, whose scale changes from step to step."""
    found = {}
    for name, dtype, size in product(REDUCERS, (torch.float16, torch.bfloat16), (1.0, 3e4)):
        model, scale, reducer = nn.Module(), torch.tensor(1.0), REDUCERS[name]()
        model.blocks = nn.ModuleList([HalfLinear(20, 12, bias=False, dtype=dtype)])
        weight = model.blocks[0].weight
        reduction = OverlappedReducer(reducer, buckets(model), Replicas(distributed.group.WORLD))  # type: ignore[arg-type]
        reduction.scales[weight] = scale  # type: ignore[index]
        draw = torch.Generator().manual_seed(distributed.get_rank())
        always, given, had = torch.randn(12, 20, generator=draw), torch.zeros(12, 20), torch.zeros(12, 20)
        for step in range(8):
            scale.fill_(8.0 * (1 + step % 3))
            model.zero_grad()
            gradient = (size * (always + 0.1 * torch.randn(12, 20, generator=draw)).clamp(-2, 2)).to(dtype)
            (weight * gradient).sum().backward()  # type: ignore[operator]
            reduction.complete()
            for part in reduction.parts([weight]):  # type: ignore[list-item]
                given += sum(grad_access.grad_values(p.grad) for p in part)  # type: ignore[arg-type]
            had += gradient.float() / scale
        found[name, dtype, size] = given, reduction.mean_error_buffers()["blocks.0.weight"], had
    return found


@pytest.fixture(scope="module")
def compressed() -> list[dict[tuple[str, torch.dtype, float], tuple[Tensor, ...]]]:
    return on_ranks(2, all_compressed)


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 3e4])
def test_parts_of_a_gradient_lost_in_16_bits_are_applied_later(compressed, name, dtype, size):
    """Values are rounded, and clamped to the range of fp16, which the sum of several gradients may exceed."""
    ranks = [rank[name, dtype, size] for rank in compressed]
    should = torch.stack([had for _, _, had in ranks]).mean(0)
    for given, kept, _ in ranks:
        assert (given + kept - should).norm() < 1e-6 * should.norm()


#: Size of the gradient of each process, and the constant that divides it before the sum. Dividing 2^-24 first by four,
#: the number of processes, gives 0; not dividing 6e4 gives Inf.
DIVIDED = [(2.0**-24, 1.0), (6e4, 4.0), (2.0**-23, None), (3e4, None)]


def averaged_by_ddp() -> list[tuple[Tensor, Tensor]]:
    """Return for each row of `DIVIDED` the means of gradients in fp16 and in fp32."""
    means = []
    for size, divisor in DIVIDED:
        model = nn.ModuleDict(
            {"narrow": HalfLinear(4, 4, bias=False, dtype=torch.float16), "wide": nn.Linear(4, 4, False)}
        )
        half, full = model.narrow.weight, model.wide.weight

        def objective(model: Any, batch: Any, *_: Any, size: float = size) -> Any:
            return sum((layer.weight * size).float().sum() for layer in model.children()), {}

        parallel = Replicated()
        parallel.divisor = divisor or parallel.divisor
        wrapped = parallel.prepare(Trainable(model, objective), torch.device("cpu"), torch.float32)
        loss, _ = wrapped({}, 0, torch.Generator())
        loss.backward()
        parallel.reduce([half, full])
        means.append((grad_access.grad_values(half.grad), full.grad))
    return means


def test_ddp_neither_overflows_nor_underflows_when_it_averages_gradients_in_16_bits():
    for means in on_ranks(4, averaged_by_ddp):
        for (size, _), (half, full) in zip(DIVIDED, means, strict=True):
            assert torch.equal(half, torch.full((4, 4), size).half().float())
            assert torch.equal(full, torch.full((4, 4), size))


def train_on(out: Path, steps: int) -> None:
    torch.manual_seed(0)
    ours, stream = Sharded(), Stream(Tokens(), 8, seed=3)
    run = TrainState(PRIOR.build(), Autoregressive(), replace(CONFIG, steps=steps), parallel=ours)
    train(run, stream, out)
    stream.close()


def stop_and_go_on(folder: Path) -> None:
    train_on(folder / "whole", 4)
    train_on(folder / "parts", 2)
    train_on(folder / "parts", 4)


def test_a_run_in_shards_resumes_bit_for_bit(tmp_path):
    on_ranks(2, stop_and_go_on, tmp_path)
    whole, parts = (
        [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    )
    assert len(whole) == 4 and whole == parts
