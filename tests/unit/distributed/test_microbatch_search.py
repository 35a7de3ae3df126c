"""The search for the number of micro-batches: equal on all processes, once for each length, and without an effect on
what is learned."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import distributed

from limner.distributed.microbatch_search import UPDATES_PER_CANDIDATE, MicrobatchSearch
from limner.distributed.pipeline import Pipelined
from limner.distributed.pipeline_layout import PipelineLayout
from limner.distributed.pipeline_schedule import count_microbatches, microbatch_candidates
from limner.training.parallel import SingleProcess
from limner.training.step import update
from pipeline_ranks import batch, begin
from ranks import on_ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch lacks process groups")

#: Seconds of an update of ranks 0 and 3 by K and M. Rank 0 prefers K micro-batches, and rank 3 prefers 4 K.
SECONDS = {
    2: {0: {2: 1.0, 4: 2.0, 8: 3.0}, 3: {2: 5.0, 4: 4.0, 8: 3.5}},
    4: {0: {4: 1.0, 8: 2.0, 16: 4.0}, 3: {4: 1.5, 8: 1.0, 16: 0.5}},
}
FASTEST = {2: 8, 4: 4}  # by the longest time of both
LONG, SHORT = PipelineLayout(stages=4), PipelineLayout(stages=2, replicas=2)
LAYOUTS = {0: SHORT, 11: LONG, 22: SHORT}  # by step
STEPS = 24


@given(st.integers(1, 6), st.integers(1, 48), st.integers(1, 40))
def test_candidates_divide_the_rows_and_keep_to_the_limits(stages, multiple, least):
    rows, layout = stages * multiple, PipelineLayout(stages=stages)
    candidates, default = microbatch_candidates(rows, layout, least), count_microbatches(rows, layout, least)
    if stages == 1:
        assert candidates == [default]
    elif default > 6 * stages:
        assert candidates == [stages if least <= stages else default]
    else:
        assert candidates == [m for m in range(stages, 6 * stages + 1, stages) if rows % m == 0 and m >= least] or (
            candidates == [default] and default < least  # the rows do not allow more
        )


def test_candidates_are_those_of_the_paper_if_the_rows_allow():
    assert microbatch_candidates(120, PipelineLayout(stages=2), 1) == [2, 4, 6, 8, 10, 12]
    assert microbatch_candidates(120, PipelineLayout(stages=2), 7) == [8, 10, 12]
    assert microbatch_candidates(14, PipelineLayout(stages=2), 1) == [2]  # 14 is more than 6 K
    assert microbatch_candidates(14, PipelineLayout(stages=2), 3) == [14]


class PlannedTimes(MicrobatchSearch):
    """A search by the times above. The first update of the fastest candidate takes longer."""

    calls = 0

    def clock(self) -> float:
        self.calls += 1
        if self.calls % 2:
            return 0.0
        assert self._timed
        stages, m = self._timed
        first = m == FASTEST[stages] and not self.seconds[self._timed]
        return SECONDS[stages].get(distributed.get_rank(), {}).get(m, 0.0) + 100.0 * first


def learn() -> dict[str, Any]:
    strategy = Pipelined(SHORT, make_count=PlannedTimes)
    run = begin(strategy, torch.float64)
    losses, counts, logged = [], [], []
    for step in range(STEPS):
        if step in LAYOUTS:
            strategy.relayout(run, LAYOUTS[step])
            logged.append(strategy.layout_values(run)["microbatches"])
        counts.append(int(update(run, batch(step, strategy))["microbatches"]))
        losses.append(run.loss)
    strategy.assert_replicas_equal(run.parameters)
    begin(strategy)
    return {"losses": losses, "counts": counts, "logged": logged, "of a new model": dict(strategy.count.seconds)}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_ranks(4, learn)


def test_all_processes_try_each_candidate_and_keep_the_fastest(runs):
    short, long = ([m for m in SECONDS[k][0] for _ in range(UPDATES_PER_CANDIDATE)] + [FASTEST[k]] * 2 for k in (2, 4))
    for run in runs:
        assert run["counts"] == [*short, *long, 8, 8]  # no second search for K = 2
        assert run["logged"] == [2, 4, 8]
        assert run["of a new model"] == {}


def test_losses_are_those_of_one_process(runs):
    alone, losses = begin(SingleProcess(), torch.float64), []
    for step in range(STEPS):
        update(alone, batch(step, alone.parallel))
        losses.append(alone.loss)
    for run in runs:
        assert run["losses"] == pytest.approx(losses, abs=1e-6)


def measure() -> dict[tuple[int, int], list[float]]:
    strategy = Pipelined(LONG, make_count=MicrobatchSearch)
    run = begin(strategy)
    for step in range(2):
        update(run, batch(step, strategy))
    assert isinstance(strategy.count, MicrobatchSearch)
    return dict(strategy.count.seconds)


def test_processes_share_their_times():
    times = on_ranks(4, measure)
    assert [len(seconds) for seconds in times[0].values() if seconds] == [2]
    assert min(times[0][4, 4]) > 0 and all(found == times[0] for found in times)
