"""The plan of a launch against a dry run, real processes, and closed forms."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from limner import errors, recipes
from limner.errors import UserError
from limner.models.transformer import SIZES, TransformerConfig
from limner.optim.optimizers import AdamW16Config, AdamWConfig, MuonConfig
from limner.planner.cost import moment_bytes, parameter_shapes
from limner.planner.dry_run import dry_run
from limner.planner.launch import Launch
from limner.planner.launch_search import Cluster, LaunchEstimate, enumerate_launches, launch_command
from limner.planner.memory_tracker import MemoryTracker, storage_bytes
from limner.quantization.precisions import Fp16Weights
from limner.training.config import TrainConfig

SMALL = TransformerConfig(
    text_vocab=512, image_vocab=256, text_len=15, grid=(32, 32), width=128, depth=4, heads=2
)  # fmt: skip
TRAINING = TrainConfig(steps=1, batch_size=16, optimizer=AdamW16Config(), ema_decay=0.9, checkpoint_activations=True)
PAPER = Launch(
    config=SIZES["dalle-12b"], training=recipes.get("dalle-12b").prior.training, gpus=1_024, replicas=128, rank=896
)


@pytest.mark.parametrize(
    ("gpus", "replicas", "changes"),
    [
        (8, 2, {}),
        (8, 1, {"optimizer": MuonConfig(), "accumulate": 2, "batch_size": 32}),
        (
            12,
            1,
            {"optimizer": AdamWConfig(), "checkpoint_activations": False, "batch_size": 12},
        ),  # 12 divides few shapes
        (4, 4, {"ema_on_cpu": True}),
        (8, 2, {"precision": Fp16Weights()}),
        (8, 1, {"precision": Fp16Weights(), "optimizer": AdamWConfig(), "accumulate": 2, "batch_size": 32}),
        (1, 1, {"batch_size": 2, "checkpoint_activations": False}),  # without FSDP
    ],
)
@pytest.mark.parametrize("kind", ["fsdp", "zero2"])
def test_the_plan_of_a_launch_matches_its_dry_run(kind: Any, gpus: int, replicas: int, changes: dict) -> None:
    launch = Launch(config=SMALL, training=replace(TRAINING, **changes), gpus=gpus, replicas=replicas, kind=kind)
    measured = dry_run(launch)
    assert measured.sizes == launch.state | {
        name: pytest.approx(launch.sizes[name], rel=0.1) for name in ("activations of a micro-batch", "peak")
    }
    assert ("averaged weights" in measured.sizes) == (not launch.training.ema_on_cpu)
    # Scalars: caption lengths, the loss, and with shards the gradient norm, in 32 bits and in 16.
    scalars = 2 + (launch.shards > 1) + launch.stores_16bit if gpus > 1 else 0
    reduced = {"all-reduce": launch.calls["all-reduce"] + scalars}
    assert measured.calls == {kind: n for kind, n in (launch.calls | reduced).items() if n}
    for kind, size in launch.sent.items():
        assert measured.sent[kind] == pytest.approx(size, abs=4096 if kind == "all-reduce" else 0)
    for name, (full, shard) in measured.shards.items():
        block_name = "blocks.0." + name.split(".", 2)[2] if name.startswith("blocks.") else name
        if launch.is_replicated(block_name):
            assert name.endswith("bias") and shard == full and block_name not in launch.uneven
            continue
        dim = int(len(full) == 2 and full[1] > full[0] and full[1] % launch.shards == 0)
        assert shard == tuple(ceil(n / launch.shards) if i == dim else n for i, n in enumerate(full))
        assert (block_name in launch.uneven) == bool(full[dim] % launch.shards)


@pytest.mark.slow
def test_dry_run_of_the_papers_model_with_4_layers_on_1024_gpus() -> None:
    launch = replace(PAPER, config=replace(PAPER.config, depth=4)).uncompressed
    measured = dry_run(launch)
    assert {name: measured.sizes[name] for name in launch.state} == launch.state
    # With 4 and with 8 layers, the two differ by the same bytes, 3.5% of the peak of 64 layers.
    assert launch.peak == pytest.approx(measured.sizes["peak"], abs=0.04 * PAPER.uncompressed.peak)
    assert measured.sent["all-gather"] == launch.sent["all-gather"]
    assert measured.shards["blocks.3.mlp.branch.up.weight"] == ((4 * 3_968, 3_968), (4 * 3_968 // 8, 3_968))


def test_powersgd_factors_of_the_papers_model() -> None:
    """P [m, r / S] and Q [n, r / S] of each matrix, sharded along its longer side."""
    d, shard_rank = 3_968, 896 // 8
    sizes = [(3 * d // 8, d), (d // 8, d), (4 * d // 8, d), (d, 4 * d // 8)]
    assert PAPER.factor_bytes == 64 * 2 * sum(shard_rank * (m + n) for m, n in sizes)
    rest, biases = sum(PAPER.shard_values[1:]), PAPER.replicated_values  # averaged over all 1,024 GPUs
    assert biases == 64 * (3 + 1 + 4 + 1) * d
    sent = 2 * 127 / 128 * (PAPER.factor_bytes + 4 * (rest + biases)) + 2 * 1_023 / 1_024 * 4 * biases
    assert PAPER.sent["all-reduce"] == pytest.approx(sent)
    assert 1 - PAPER.factor_bytes / (4 * PAPER.shard_values[0]) > 0.91  # matrices, at least the rate of Table 1
    matrices, plain = 12 * 64 * d * d / 8, replace(PAPER, rank=None)
    assert PAPER.state["error buffers"] == 2 * matrices and PAPER.state["factors"] == 2 * PAPER.factor_bytes
    # E.2: the backward pass adds gradients in 16 bits to the buffers, the update decompresses them by resblock.
    assert plain.state["gradients"] - PAPER.state["gradients"] == pytest.approx(2 * matrices * 63 / 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 3}, "1024 processes cannot hold 3 replicas: choose a divisor of 1024"),
        ({"rank": 900}, "a rank of 900 cannot be divided among 8 shards: choose a multiple of 8"),
        ({"rank": 8_000}, "a rank of 8000 exceeds the size of a matrix shard: choose at most 3968"),
        ({"replicas": 1, "rank": 1_024}, "a rank of 1024 needs at least two replicas"),
        ({"gpus": 2_048}, "a batch of 1024 cannot be divided among 2048 ranks: choose a multiple of 2048"),
        (
            {"training": replace(PAPER.training, accumulate=2)},
            "1 samples per rank cannot be divided into 2 micro-batches",
        ),
    ],
)
def test_an_invalid_launch_raises(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(PAPER, **changes)


def test_bytes_of_moments() -> None:
    assert moment_bytes(AdamWConfig()) == (8, 8, 8)
    assert moment_bytes(AdamW16Config()) == (4, 8, 8)
    assert moment_bytes(MuonConfig()) == (4, 8, 8)


def test_the_fastest_launch_that_fits_is_first() -> None:
    training = PAPER.training
    estimates = enumerate_launches(PAPER.config, training, 1_024, Cluster(gpu="h100-80gb"))
    assert [t.fits for t in estimates] == sorted((t.fits for t in estimates), reverse=True)
    fitting = [t for t in estimates if t.fits]
    assert fitting and fitting[0].seconds == min(t.seconds for t in fitting)
    slow, fast = (enumerate_launches(SMALL, TRAINING, 16, Cluster(gpu="h100-80gb", link=link)) for link in (1e6, 1e15))
    assert slow[0].launch.replicas > 1 and slow[0].launch.shards == 8  # no ring of shards crosses the link
    assert fast[0].launch.rank is None  # compression costs more time than it saves
    wide = enumerate_launches(SIZES["xl"], replace(training, batch_size=64), 16, Cluster(gpu="h100-80gb", link=1e8))
    assert (
        wide[0].launch.rank
        and wide[0].between_seconds < 0.3 * replace(wide[0], launch=wide[0].launch.uncompressed).between_seconds
    )
    (gpus,) = {t.launch.gpus for t in enumerate_launches(SMALL, TRAINING, 1, Cluster(gpu="h100-80gb"))}
    assert gpus == 1


def test_zero2_is_first_for_slow_links_and_enough_memory() -> None:
    wide = replace(PAPER.training, batch_size=16)
    best = enumerate_launches(SIZES["xl"], wide, 16, Cluster(gpu="h100-80gb", link=1e8), replicas=1)[0]
    assert best.launch.kind == "zero2" and "--parallel zero2 --dp-replicate 1" in launch_command(best, "xl", wide)
    assert {t.launch.kind for t in enumerate_launches(SMALL, TRAINING, 4, Cluster(gpu="h100-80gb"), replicas=4)} == {
        "fsdp"
    }


def test_traffic_through_the_link_of_a_machine() -> None:
    """One ring of shards, and one ring of replicas per shard of the machine."""
    cluster = Cluster(gpu="h100-80gb", per_machine=4, link=1.0)
    for replicas, rings in ((8, 2), (4, 4), (2, 4)):
        launch = Launch(config=SMALL, training=TRAINING, gpus=16, replicas=replicas)
        (estimate,) = [t for t in enumerate_launches(SMALL, TRAINING, 16, cluster, replicas) if t.launch == launch]
        shards = launch.sent["all-gather"] + launch.sent["reduce-scatter"] if launch.shards > 4 else 0
        assert estimate.between_seconds == pytest.approx(rings * launch.sent["all-reduce"] + shards)
    (single,) = [
        t
        for t in enumerate_launches(SMALL, TRAINING, 4, cluster, 2)
        if t.launch.training == TRAINING and not t.launch.rank and t.launch.kind == "fsdp"
    ]
    assert single.between_seconds == 0 < single.within_seconds


def test_the_command_has_only_options_that_differ_from_the_recipe() -> None:
    defaults = replace(TRAINING, batch_size=64)
    estimate = enumerate_launches(SMALL, TRAINING, 1, Cluster(gpu="h100-80gb"))[0]
    command = launch_command(estimate, "small", defaults)
    assert command.startswith("limner train DATA --recipe small --out RUN --stages prior \\\n")
    assert "--prior.training.batch-size 16" in command and "torchrun" not in command
    estimate = LaunchEstimate(launch=PAPER, cluster=Cluster(gpu="v100-16gb"))
    assert "--grad-compression powersgd --grad-compression.rank 896" in launch_command(estimate, "xl", PAPER.training)
    assert "compression" not in launch_command(estimate, "dalle-12b", PAPER.training, 896)
    uncompressed = replace(estimate, launch=PAPER.uncompressed)
    assert "--grad-compression none" in launch_command(uncompressed, "dalle-12b", PAPER.training, 896)
    assert "compression" not in launch_command(uncompressed, "xl", PAPER.training)


def test_the_tracker_counts_live_bytes() -> None:
    with MemoryTracker() as tracker:
        a = torch.ones(1_000)
        b = a.view(10, 100)
        assert tracker.current == storage_bytes([a, b]) == 4_000
        c = b @ b.T
        assert tracker.current == 4_000 + 400
        del a
        assert tracker.current == 4_400  # b shares its storage
        del b
        assert tracker.current == 400 and tracker.peak >= 4_400
        tracker.reset()
        c.untyped_storage().resize_(0)
        assert tracker.refresh() == 0 and tracker.peak == 400


@pytest.mark.slow
def test_the_plan_matches_real_processes() -> None:
    bench = Path(__file__).parents[3] / "bench/memory_per_rank.py"
    size = ("--width", "64", "--depth", "3", "--vocab", "256", "--samples", "1", "--checkpointed")
    environment = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, bench, "--ranks", "2", *size], capture_output=True, text=True, env=environment, timeout=400
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith("%")]
    assert [row[0] for row in rows] == ["weights", "gradients", "moments", "averaged", "activations", "peak"]
    assert all(abs(float(row[-1].rstrip("%"))) < 10 for row in rows), result.stdout


def test_parameter_shapes_match_the_model() -> None:
    block, rest = parameter_shapes(SMALL)
    model = SMALL.build()
    assert {**rest, **block} == {
        name: tuple(p.shape)
        for name, p in model.named_parameters()
        if not name.startswith(("blocks.1", "blocks.2", "blocks.3"))
    }
    json.dumps(block)
