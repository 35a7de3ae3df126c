"""The search against all cuts and all numbers of micro-batches of small models."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from limner.planner.pipeline_schedules import SCHEDULES
from limner.planner.pipeline_search import search
from limner.planner.pipeline_simulator import Cost, Link, Pipeline, merge, simulate


def settings(name="gpipe", **values):
    return Pipeline(stages=(), devices=1, microbatches=1, schedule=SCHEDULES[name], **values)


def random_units(draw, count):
    return [Cost(forward=draw.uniform(0.5, 2), backward=draw.uniform(1, 4), gradients=1) for _ in range(count)]


@pytest.mark.parametrize(("name", "gap"), [("gpipe", 1e-9), ("1f1b", 0.1)])
def test_the_fastest_pipeline_of_all_cuts_is_found(name, gap):
    gaps = []
    for seed in range(12):
        generator = random.Random(seed)
        units, samples = random_units(generator, generator.randint(4, 7)), generator.choice([8, 16])
        base = settings(name, launch=generator.choice([0, 0.5]), replica_link=Link(10))
        found = {estimate.settings.devices: estimate for estimate in search(units, 4, samples, base)}
        assert set(found) == {k for k in (1, 2, 4) if any(samples * k // 4 % m == 0 for m in range(k, 6 * k + 1))}
        for k, estimate in found.items():
            share = samples * k // 4
            best = min(
                simulate(
                    replace(base, stages=merge(units, (0, *cuts, len(units)), share // m), devices=k, microbatches=m,
                            replicas=4 // k)
                ).seconds
                for cuts in combinations(range(1, len(units)), k - 1)
                for m in range(k, 6 * k + 1)
                if share % m == 0
            )  # fmt: skip
            gaps.append(estimate.seconds / best - 1)
    assert max(gaps) + 1e-12 >= 0 and max(gaps) <= gap
    assert sum(gaps) / len(gaps) < 0.02


def test_results_are_sorted_and_replicas_fill_the_devices():
    units = random_units(random.Random(0), 6)
    found = search(units, 6, 36, settings())
    assert [estimate.seconds for estimate in found] == sorted(estimate.seconds for estimate in found)
    assert {estimate.settings.devices * estimate.settings.replicas for estimate in found} == {6}
    assert all(
        estimate.samples * estimate.settings.microbatches * estimate.settings.replicas == 36 for estimate in found
    )
    assert search(units, 4, 7, settings()) == [] or all(
        e.settings.devices == 4 for e in search(units, 4, 7, settings())
    )


def test_slow_replica_links_lengthen_the_pipeline_and_launch_times_reduce_micro_batches():
    """With equal units, one device per replica has neither a bubble nor transfers; averaging gradients changes that."""
    units = [Cost(forward=1, backward=2, gradients=1) for _ in range(8)]
    assert search(units, 4, 64, settings())[0].settings.devices == 1
    assert search(units, 4, 64, settings(replica_link=Link(0.01)))[0].settings.devices == 4
    # An update of 4 stages takes 6 (64 + 3 * 64 / M) + 2 (M + 3) launches, least at M = sqrt(576 / launch).
    for launch, microbatches in ((0, 16), (9, 8), (400, 4)):
        four = next(e for e in search(units, 4, 64, settings(launch=launch)) if e.settings.devices == 4)
        assert four.settings.microbatches == microbatches


def test_the_prologue_is_per_sample():
    units = [Cost(forward=1, backward=2) for _ in range(4)]
    without, with_prologue = (search(units, 2, 8, settings(prologue=seconds)) for seconds in (0, 10))
    added = {e.settings.devices: e.seconds for e in with_prologue}
    for estimate in without:
        k = estimate.settings.devices
        assert added[k] == estimate.seconds + 10 * 8 * k / 2
