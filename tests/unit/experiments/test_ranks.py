"""Simulated replicas match processes; formulas and criteria of the findings on compressed gradients."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from limner.distributed.gradient_reducers import Fp32Reducer
from limner.distributed.powersgd import PowerSGD, PowerSGDConfig
from limner.distributed.replicated import Replicated
from limner.experiments import bandwidth
from limner.experiments.gradient_compression import FORMATS, METHODS, orthonormality, smallest_rank
from limner.experiments.replicas import SimulatedReplicas
from limner.models.transformer import TransformerConfig
from limner.numerics.precision import Fp32
from limner.objectives.autoregressive import Autoregressive
from limner.optim.optimizers import AdamWConfig
from limner.training.config import TrainConfig
from limner.training.parallel import Parallel, SingleProcess
from limner.training.step import update
from limner.training.train_state import TrainState
from ranks import on_ranks


def learn(strategy: Parallel, accumulate: int = 1) -> list[torch.Tensor]:
    """Weights after three updates, each replica with its share of the batch."""
    config = TransformerConfig(text_vocab=16, image_vocab=16, text_len=4, grid=(4, 4), width=32, depth=2, heads=2)
    torch.manual_seed(0)
    settings = TrainConfig(
        steps=3, batch_size=8, accumulate=accumulate, optimizer=AdamWConfig(lr=1e-3), precision=Fp32(), seed=1
    )
    run = TrainState(config.build(), Autoregressive(), settings, parallel=strategy)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        text, image = (torch.randint(16, (8, n), generator=generator) for n in (4, 16))
        share = {
            "text": text.chunk(strategy.world_size)[strategy.rank],
            "image": image.chunk(strategy.world_size)[strategy.rank],
        }
        update(run, share)
    return [p.detach().clone() for p in run.parameters]


def compressed() -> PowerSGD:
    return PowerSGD(PowerSGDConfig(rank=4))


def learn_on_rank() -> list[torch.Tensor]:
    return learn(Replicated(compressed))


def test_uncompressed_simulated_replicas_match_one_process():
    for ours, theirs in zip(learn(SimulatedReplicas(Fp32Reducer, 4), 4), learn(SingleProcess()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_simulated_replicas_compress_like_processes():
    strategy = SimulatedReplicas(compressed, 2)
    ours = learn(strategy, 2)
    for theirs in on_ranks(2, learn_on_rank):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert not all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(ours, learn(SingleProcess()), strict=True)
    )
    assert len({group.sent for group in strategy.groups}) == 1 and strategy.groups[0].sent > 0


@pytest.mark.parametrize(
    ("gaps", "smallest"),
    [
        ({4: 0.5, 8: 0.2, 16: 0.01, 32: -0.01}, 16),
        ({4: 0.5, 8: 0.01, 16: 0.2, 32: 0.01}, 32),  # luck below a gap does not count
        ({4: 0.5, 8: 0.2}, None),
        ({4: 0.0, 8: 0.0}, 4),
    ],
)
def test_the_smallest_rank_has_no_gap_above_it(gaps: dict[int, float], smallest: int | None):
    assert smallest_rank(gaps, noise=0.1) == smallest


@pytest.mark.parametrize("method", METHODS.values())
def test_all_methods_agree_on_well_conditioned_columns(method: Callable[[Any], Any]):
    p = torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(0))
    ours, theirs = method(p), torch.linalg.qr(p)[0]
    torch.testing.assert_close(ours @ ours.mT, theirs @ theirs.mT, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.mT @ ours, torch.eye(6).expand(3, 6, 6), rtol=0, atol=1e-5)


def test_only_reflections_stay_orthonormal():
    for method, form in itertools.product(METHODS, FORMATS):
        (error,) = orthonormality(method=method, form=form, digits=(None,), seed=0, matrices=2, m=64, r=8).values()
        assert (error > 1e-2) == ("Gram" in method)


def test_the_formula_counts_the_factors_of_all_matrices_of_a_resblock():
    r, d, m = 16, 64, 4
    ours = [(3 * d / m, d), (d / m, d), (4 * d / m, d), (d, 4 * d / m)]
    assert bandwidth.our_share(d, r, m) == pytest.approx(
        sum(r / m * (h + w) for h, w in ours) / sum(h * w for h, w in ours)
    )


def test_missing_counters_raise(tmp_path: Path):
    with pytest.raises(bandwidth.UserError, match="on Linux only"):
        bandwidth.written_bytes(tmp_path / "absent")
