"""A freezing rule shortens the pipeline during training: the run equals one process, and survives kills."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from limner.distributed.pipeline_layout import PipelineLayout
from limner.models.transformer import Transformer
from limner.training.checkpoint import completed, load_weights, read_groups
from limner.training.metrics_log import read_metrics
from limner.training.parallel import SingleProcess
from pipeline_ranks import PRIOR, KilledInTransition, Planned, freeze_in, losses
from ranks import at_work, on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")

INITIAL = PipelineLayout(stages=4)
#: Step, frozen blocks, K, R, M.
LAYOUTS = [(2, 7, 2, 2, 4), (3, 6, 4, 1, 8), (4, 11, 1, 4, 1), (6, 11, 1, 4, 1)]


def decisions(out: Path) -> list[dict[str, Any]]:
    return [entry for row in read_metrics(out / "metrics.jsonl") for entry in row.get("freezing", [])]


def statistics(decision: dict[str, Any]) -> list[float]:
    """Statistics of a decision that an evaluation did not cause."""
    return [] if "the score rose" in decision["reason"] else json.loads(decision["reason"])


def freeze_twice(out: Path) -> None:
    """Train without a stop, and in two parts of which the first ends between two decisions; both also with a cache."""
    for name, parts in {"whole": (6,), "parts": (5, 6), "cached": (6,), "cached-parts": (5, 6)}.items():
        for steps in parts:
            freeze_in(out / name, INITIAL, Planned(), steps=steps, cached="cached" in name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four processes, and the run `alone` of one."""
    out = tmp_path_factory.mktemp("runs")
    on_ranks(4, freeze_twice, out)
    freeze_in(out / "alone", SingleProcess(), Planned())
    freeze_in(out / "alone-cached", SingleProcess(), Planned(), cached=True)
    return out


@pytest.mark.parametrize("name", ["whole", "parts", "cached", "cached-parts"])
def test_losses_and_statistics_are_those_of_one_process(runs, name):
    alone = runs / ("alone-cached" if "cached" in name else "alone")
    assert losses(runs / name) == pytest.approx(losses(alone), abs=1e-6)
    for found, expected in zip(decisions(runs / name), decisions(alone), strict=True):
        assert (found["step"], found["frozen"]) == (expected["step"], expected["frozen"])
        assert statistics(found) == pytest.approx(statistics(expected), rel=1e-4)


@pytest.mark.parametrize("name", ["whole", "parts", "cached"])
def test_the_length_follows_the_frozen_blocks_and_all_processes_are_used(runs, name):
    keys = ("step", "frozen", "stages", "replicas", "microbatches")
    assert [tuple(d[key] for key in keys) for d in decisions(runs / name)] == LAYOUTS


def test_the_first_process_of_a_pipeline_reads_and_writes_the_cache(runs):
    rows = {row["step"]: row for row in read_metrics(runs / "cached" / "metrics.jsonl")}
    assert all(rows[step]["cache/reads"] for step in (3, 4, 5, 6)) and "cache/reads" not in rows[2]
    (cached,) = (runs / "cached" / "cache").glob("*.activations")
    assert 0 < cached.stat().st_size <= 1 << 24


def die(out: Path, moment: str) -> None:
    freeze_in(out, KilledInTransition(INITIAL, out, moment), Planned())


def resume(out: Path, layout: PipelineLayout) -> None:
    freeze_in(out, layout, Planned())


def check_equal(out: Path, alone: Path) -> None:
    """Compare losses, names and shapes of states, and weights of two runs."""
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)
    found, expected = (read_groups(completed(folder)[-1]) for folder in (out, alone))
    for group in ("model", "ema", "optimizer"):
        assert {name: x.shape for name, x in found[group].items()} == {n: x.shape for n, x in expected[group].items()}
    assert_close(*(_load(folder) for folder in (out, alone)))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_run_killed_at_a_transition_resumes(runs, moment, tmp_path):
    out, other = tmp_path / "killed", tmp_path / "other"
    with at_work(4, die, out, moment) as (processes, _):
        processes[3].join(120)
        assert processes[3].exitcode == -9
    assert [path.name for path in completed(out)] == ["step-00000003"]
    shutil.copytree(out, other)
    on_ranks(4, resume, out, INITIAL)
    with pytest.warns(UserWarning, match="results may differ"):
        freeze_in(other, SingleProcess(), Planned())
    for folder in (out, other):
        check_equal(folder, runs / "alone")
    assert decisions(out)[-3:] == decisions(runs / "whole")[-3:]


def _load(folder: Path) -> Transformer:
    model = replace(PRIOR, depth=12).build()
    load_weights(model, folder)
    return model


def assert_close(model: Transformer, other: Transformer) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-4), name
