"""What a launch is said to take against a trial of it, against real processes, and against closed forms."""

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
from limner.layers.precisions import Fp16Weights
from limner.models.transformer import SIZES, TransformerConfig
from limner.optim.optimizers import AdamW16Config, AdamWConfig, MuonConfig
from limner.profiling.dry_run import try_out
from limner.profiling.launch import Launch, moment_bytes, shapes
from limner.profiling.launch_search import Cluster, choices, command
from limner.profiling.memory_tracker import Watcher, storage_bytes
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
    ],
)
@pytest.mark.parametrize("kind", ["sharded", "zero2"])
def test_a_launch_takes_in_a_trial_what_was_calculated(kind: Any, gpus: int, replicas: int, changes: dict) -> None:
    launch = Launch(config=SMALL, training=replace(TRAINING, **changes), gpus=gpus, replicas=replicas, kind=kind)
    trial = try_out(launch)
    assert trial.state == launch.state
    assert ("averaged weights" in trial.state) == (not launch.training.ema_on_cpu)
    assert sum(launch.activations.values()) == pytest.approx(trial.activations, rel=0.1)
    assert launch.peak == pytest.approx(trial.peak, rel=0.1)
    # Single ones: captions' lengths, the loss, and of shards the gradient's length, in 32 bits and in 16.
    numbers = 2 + (launch.shards > 1) + launch.stored
    reduced = {"all-reduce": launch.calls["all-reduce"] + numbers}
    assert trial.calls == {kind: n for kind, n in (launch.calls | reduced).items() if n}
    for kind, size in launch.sent.items():
        assert trial.sent[kind] == pytest.approx(size, abs=4096 if kind == "all-reduce" else 0)
    for name, (whole, part) in trial.shards.items():
        block_name = "blocks.0." + name.split(".", 2)[2] if name.startswith("blocks.") else name
        if launch.is_whole(block_name):
            assert name.endswith("bias") and part == whole and block_name not in launch.uneven
            continue
        along = int(len(whole) == 2 and whole[1] > whole[0] and whole[1] % launch.shards == 0)
        assert part == tuple(ceil(n / launch.shards) if i == along else n for i, n in enumerate(whole))
        assert (block_name in launch.uneven) == bool(whole[along] % launch.shards)


@pytest.mark.slow
def test_the_papers_model_is_tried_on_its_1024_gpus() -> None:
    launch = PAPER.uncompressed
    trial = try_out(launch)
    assert trial.state == launch.state
    assert launch.peak == pytest.approx(trial.peak, rel=0.1)
    assert trial.sent["all-gather"] == launch.sent["all-gather"]
    assert trial.shards["blocks.63.mlp.branch.up.weight"] == ((4 * 3_968, 3_968), (4 * 3_968 // 8, 3_968))


def test_factors_of_the_papers_model() -> None:
    """P [m, r / S] and Q [n, r / S] of each matrix, which is cut along its longer side."""
    d, each = 3_968, 896 // 8
    sizes = [(3 * d // 8, d), (d // 8, d), (4 * d // 8, d), (d, 4 * d // 8)]
    assert PAPER.factors == 64 * 2 * sum(each * (m + n) for m, n in sizes)
    others, biases = sum(PAPER.values[1:]), PAPER.whole  # which all 1,024 average
    assert biases == 64 * (3 + 1 + 4 + 1) * d
    sent = 2 * 127 / 128 * (PAPER.factors + 4 * (others + biases)) + 2 * 1_023 / 1_024 * 4 * biases
    assert PAPER.sent["all-reduce"] == pytest.approx(sent)
    assert 1 - PAPER.factors / (4 * PAPER.values[0]) > 0.91  # of the matrices, compressed as in Table 1 or better
    assert PAPER.state["error buffers"] == 2 * 12 * 64 * d * d / 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"replicas": 3}, "1024 processes cannot hold 3 replicas: choose a divisor of 1024"),
        ({"rank": 900}, "a rank of 900 cannot be divided among 8 shards: choose a multiple of 8"),
        ({"rank": 8_000}, "a rank of 8000 is more than shards of matrices have: choose at most 3968"),
        ({"replicas": 1, "rank": 1_024}, "a rank of 1024 is for gradients between replicas, and there is one"),
        ({"gpus": 2_048}, "a batch of 1024 cannot be divided among 2048 ranks: choose a multiple of 2048"),
        (
            {"training": replace(PAPER.training, accumulate=2)},
            "the 1 samples of a rank cannot be divided into 2 micro-batches",
        ),
    ],
)
def test_a_wrong_launch_is_refused_in_a_sentence(changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(PAPER, **changes)


def test_bytes_of_moments_are_those_of_the_optimisers() -> None:
    assert moment_bytes(AdamWConfig()) == (8, 8, 8)
    assert moment_bytes(AdamW16Config()) == (4, 8, 8)
    assert moment_bytes(MuonConfig()) == (4, 8, 8)


def test_the_quickest_launch_that_fits_is_chosen() -> None:
    training = PAPER.training
    found = choices(PAPER.config, training, 1_024, Cluster(gpu="h100-80gb"))
    assert [t.fits for t in found] == sorted((t.fits for t in found), reverse=True)
    fitting = [t for t in found if t.fits]
    assert fitting and fitting[0].seconds == min(t.seconds for t in fitting)
    slow, fast = (choices(SMALL, TRAINING, 16, Cluster(gpu="h100-80gb", link=link)) for link in (1e6, 1e15))
    assert slow[0].launch.replicas > 1 and slow[0].launch.shards == 8  # a ring of shards would cross the link
    assert fast[0].launch.rank is None  # compression takes longer than it saves
    wide = choices(SIZES["xl"], replace(training, batch_size=64), 16, Cluster(gpu="h100-80gb", link=1e8))
    assert wide[0].launch.rank and wide[0].between < 0.3 * replace(wide[0], launch=wide[0].launch.uncompressed).between
    (one,) = {t.launch.gpus for t in choices(SMALL, TRAINING, 1, Cluster(gpu="h100-80gb"))}
    assert one == 1


def test_zero2_is_chosen_where_links_are_slow_and_memory_suffices() -> None:
    wide = replace(PAPER.training, batch_size=16)
    best = choices(SIZES["xl"], wide, 16, Cluster(gpu="h100-80gb", link=1e8), replicas=1)[0]
    assert best.launch.kind == "zero2" and "--parallel zero2 --replicas 1" in command(best, "xl", wide)
    assert {t.launch.kind for t in choices(SMALL, TRAINING, 4, Cluster(gpu="h100-80gb"), replicas=4)} == {"sharded"}


def test_what_crosses_the_link_of_a_machine() -> None:
    """A ring of all shards once; of each ordinal's replicas one each."""
    cluster = Cluster(gpu="h100-80gb", per_machine=4, link=1.0)
    for replicas, rings in ((8, 2), (4, 4), (2, 4)):
        launch = Launch(config=SMALL, training=TRAINING, gpus=16, replicas=replicas)
        (timed,) = [t for t in choices(SMALL, TRAINING, 16, cluster, replicas) if t.launch == launch]
        sharing = launch.sent["all-gather"] + launch.sent["reduce-scatter"] if launch.shards > 4 else 0
        assert timed.between == pytest.approx(rings * launch.sent["all-reduce"] + sharing)
    (alone,) = [
        t
        for t in choices(SMALL, TRAINING, 4, cluster, 2)
        if t.launch.training == TRAINING and not t.launch.rank and t.launch.kind == "sharded"
    ]
    assert alone.between == 0 < alone.within


def test_the_command_changes_what_the_recipe_has_otherwise() -> None:
    before = replace(TRAINING, batch_size=64)
    timed = choices(SMALL, TRAINING, 1, Cluster(gpu="h100-80gb"))[0]
    said = command(timed, "small", before)
    assert said.startswith("limner train DATA --recipe small --out RUN --stages prior \\\n")
    assert "--prior.training.batch-size 16" in said and "torchrun" not in said


def test_a_watch_counts_what_is_alive() -> None:
    with Watcher() as watch:
        a = torch.ones(1_000)
        b = a.view(10, 100)
        assert watch.now == storage_bytes([a, b]) == 4_000
        c = b @ b.T
        assert watch.now == 4_000 + 400
        del a
        assert watch.now == 4_400  # b holds it
        del b
        assert watch.now == 400 and watch.peak >= 4_400
        watch.restart()
        c.untyped_storage().resize_(0)
        assert watch.read() == 0 and watch.peak == 400


def test_an_older_torch_is_refused_in_a_sentence(monkeypatch) -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    monkeypatch.delattr(ShardingPropagator, "_fake_mode_lock")
    with pytest.raises(UserError, match="take 2.13 or newer"):
        Watcher()


def test_real_processes_take_what_was_calculated() -> None:
    bench = Path(__file__).parents[3] / "bench/memory_per_rank.py"
    size = ("--width", "64", "--depth", "3", "--vocab", "256", "--samples", "1", "--checkpointed")
    environment = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, bench, "--ranks", "2", *size], capture_output=True, text=True, env=environment, timeout=400
    )
    assert ran.returncode == 0, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines() if line.endswith("%")]
    assert [row[0] for row in rows] == ["weights", "gradients", "moments", "averaged", "activations", "peak"]
    assert all(abs(float(row[-1].rstrip("%"))) < 10 for row in rows), ran.stdout


def test_shapes_are_those_of_the_model() -> None:
    block, rest = shapes(SMALL)
    model = SMALL.build()
    assert {**rest, **block} == {
        name: tuple(p.shape)
        for name, p in model.named_parameters()
        if not name.startswith(("blocks.1", "blocks.2", "blocks.3"))
    }
    json.dumps(block)
