"""Checkpoints of pipelines are complete: another layout, one process, and a run that was killed continue from them."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import distributed

from limner.distributed.pipeline_layout import PipelineLayout
from limner.models.transformer import Transformer
from limner.training.checkpoint import completed, load_weights, read_groups
from limner.training.metrics_log import read_metrics
from limner.training.parallel import SingleProcess
from pipeline_ranks import PRIOR, SHRINKING, KilledInTransition, Layouts, train_in
from ranks import at_work, on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")


def die(out: Path, moment: str) -> None:
    train_in(out, SHRINKING[0], KilledInTransition(SHRINKING, out, moment))


def resume(out: Path, layout: PipelineLayout) -> None:
    train_in(out, layout, Layouts(SHRINKING))


def losses(out: Path) -> list[float]:
    return [row[name] for row in read_metrics(out / "metrics.jsonl") for name in row if name in ("loss", "eval/text")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that freezes the same parts of the model."""
    out = tmp_path_factory.mktemp("alone")
    train_in(out, SingleProcess(), Layouts(SHRINKING))
    return out


def killed(out: Path, moment: str) -> None:
    with at_work(4, die, out, moment) as (processes, _):
        processes[3].join(120)
        assert processes[3].exitcode == -9
    assert [path.name for path in completed(out)] == ["step-00000003"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["during", "after"])
def test_a_run_killed_in_a_transition_resumes_in_any_layout(alone, moment, tmp_path):
    out, other = tmp_path / "killed", tmp_path / "other"
    killed(out, moment)
    shutil.copytree(out, other)
    on_ranks(4, resume, out, PipelineLayout(stages=2, replicas=2))
    with pytest.warns(UserWarning, match="results may differ"):
        train_in(other, SingleProcess(), Layouts(SHRINKING))
    for folder in (out, other):
        assert losses(folder) == pytest.approx(losses(alone), abs=1e-5)
    expected, found = (read_groups(completed(folder)[-1]) for folder in (alone, out))
    for group in ("model", "ema", "optimizer"):
        assert found[group].keys() == expected[group].keys()
        for name, value in expected[group].items():
            assert found[group][name].shape == value.shape
    weights = [PRIOR.build() for _ in range(2)]
    for model, folder in zip(weights, (out, alone), strict=True):
        load_weights(model, folder)
    assert_close(*weights)


def assert_close(model: Transformer, other: Transformer) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-4), name


def test_a_pipeline_continues_a_run_of_one_process(alone, tmp_path):
    out = tmp_path / "run"
    train_in(out, SingleProcess(), Layouts(SHRINKING), steps=3)
    on_ranks(4, resume, out, SHRINKING[0])
    assert losses(out)[-4:] == pytest.approx(losses(alone)[-4:], abs=1e-5)
    found, expected = (read_metrics(folder / "stability.jsonl") for folder in (out, alone))
    for row, other in zip(found, expected, strict=True):
        for kind in ("rms", "features"):  # of all stages
            assert row[kind] == pytest.approx(other[kind], rel=0.02, abs=0.02)
