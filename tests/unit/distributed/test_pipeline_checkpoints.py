"""Checkpoints of pipelines do not depend on the layout."""

from pathlib import Path

import pytest
from torch import distributed

from limner.distributed.pipeline_layout import PipelineLayout
from limner.training.metrics_log import read_metrics
from limner.training.parallel import SingleProcess
from pipeline_ranks import SHRINKING, Layouts, losses, train_in
from ranks import on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")


def resume(out: Path, layout: PipelineLayout) -> None:
    train_in(out, layout, Layouts(SHRINKING))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that freezes the same parts of the model."""
    out = tmp_path_factory.mktemp("alone")
    train_in(out, SingleProcess(), Layouts(SHRINKING))
    return out


def test_a_pipeline_continues_a_run_of_one_process(alone, tmp_path):
    out = tmp_path / "run"
    train_in(out, SingleProcess(), Layouts(SHRINKING), steps=3)
    on_ranks(4, resume, out, SHRINKING[0])
    assert losses(out)[-4:] == pytest.approx(losses(alone)[-4:], abs=1e-5)
    found, expected = (read_metrics(folder / "stability.jsonl") for folder in (out, alone))
    for row, other in zip(found, expected, strict=True):
        for kind in ("rms", "features"):  # of all stages
            assert row[kind] == pytest.approx(other[kind], rel=0.02, abs=0.02)
