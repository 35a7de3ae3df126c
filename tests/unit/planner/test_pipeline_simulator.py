"""Simulated pipelines against closed forms, a simulation in ticks, and the orders of torch's schedules."""

import random
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, _ComputationType

from limner.errors import UserError
from limner.planner.pipeline_schedules import SCHEDULES, Pass, gpipe, interleaved, one_forward_one_backward
from limner.planner.pipeline_simulator import Cost, Link, Pipeline, freeze, merge, simulate

EQUAL = Cost(forward=1, backward=2, stored=5, weights=7, gradients=11, moments=13)


def pipeline(stages, microbatches, schedule, devices=None, **settings):
    return Pipeline(
        stages=stages, devices=devices or len(stages), microbatches=microbatches, schedule=schedule, **settings
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 5, 16])
def test_equal_stages_follow_the_closed_forms(devices, microbatches):
    """GPipe and 1F1B take M + K - 1 slots of a forward and a backward pass; GPipe stores M micro-batches, 1F1B at most
    K - k on device k."""
    k, m = devices, microbatches
    for schedule in (gpipe, one_forward_one_backward):
        result = simulate(pipeline([EQUAL] * k, m, schedule))
        assert result.seconds == result.computed == 3 * (m + k - 1)
        assert result.bubble == pytest.approx((k - 1) / (m + k - 1))
        assert result.busy == (3 * m,) * k
        assert [seconds / result.computed for seconds in result.busy] == pytest.approx([m / (m + k - 1)] * k)
        alive = [m] * k if schedule is gpipe else [min(m, k - d) for d in range(k)]
        assert list(result.microbatches) == alive
        assert list(result.memory) == [31 + 5 * n for n in alive]


@pytest.mark.parametrize(("devices", "per_device", "rounds"), [(2, 2, 1), (2, 2, 3), (4, 2, 2), (4, 3, 2), (3, 4, 1)])
def test_interleaving_divides_the_bubble(devices, per_device, rounds):
    """The bubble of K - 1 slots has slots of a stage, which is 1 / v of a device's share (Narayanan et al. 2021)."""
    m = devices * rounds
    result = simulate(pipeline([EQUAL] * devices * per_device, m, interleaved, devices))
    assert result.seconds == 3 * (per_device * m + devices - 1)
    assert result.bubble == pytest.approx((devices - 1) / (per_device * m + devices - 1))


@pytest.mark.parametrize(
    ("devices", "per_device", "microbatches"), [(2, 2, 4), (4, 2, 8), (3, 3, 6), (4, 2, 10), (4, 2, 3)]
)
def test_interleaved_orders_are_those_of_torch(devices, per_device, microbatches):
    rounds = max(1, microbatches // devices)
    torchs = SimpleNamespace(
        n_local_stages=per_device, pp_group_size=devices, microbatches_per_round=microbatches // rounds,
        _n_microbatches=microbatches,
    )  # fmt: skip
    for rank in range(devices):
        order = ScheduleInterleaved1F1B._calculate_single_rank_operations(torchs, rank)
        expected = [
            Pass(action.computation_type != _ComputationType.FORWARD, action.stage_index, action.microbatch_index)
            for action in order
            if action
        ]
        assert interleaved(rank, devices, devices * per_device, microbatches) == expected


def ticks(case):
    """Simulate integer costs tick by tick: devices, then links, start what they can."""
    stages, k = case.stages, case.devices
    orders = [list(case.schedule(d, k, len(stages), case.microbatches)) for d in range(k)]
    orders = [[step for step in order if not step.backward or stages[step.stage].backward] for order in orders]
    arrived, queues, running, sending, now = set(), {}, {}, {}, 0
    if case.prologue:
        running[0] = (case.prologue, None)
    end = 0
    while any(orders) or running or any(queues.values()) or sending:
        for device, (until, step) in list(running.items()):
            if until == now:
                del running[device]
                if step is None:
                    continue
                end = now
                arrived.add((device, step))
                target = step.stage + (-1 if step.backward else 1)
                if 0 <= target < len(stages) and (not step.backward or stages[target].backward):
                    queues.setdefault((device, target % k), []).append(step)
        for link, (until, step) in list(sending.items()):
            if until == now:
                del sending[link]
                arrived.add((link[1], step))
        progress = True
        while progress:  # transfers of no time arrive within the tick
            progress = False
            for link, queue in queues.items():
                if queue and link not in sending:
                    step, progress = queue.pop(0), True
                    size = stages[step.stage - 1 if step.backward else step.stage].output
                    time = 0 if link[0] == link[1] else case.link.latency + size / case.link.bandwidth
                    if time:
                        sending[link] = (now + time, step)
                    else:
                        arrived.add((link[1], step))
        for device, order in enumerate(orders):
            if device in running or not order:
                continue
            step = order[0]
            source = step.stage + (1 if step.backward else -1)
            needed = {(device, Pass(step.backward, source, step.microbatch))} if 0 <= source < len(stages) else set()
            if step.backward:
                needed.add((device, Pass(False, step.stage, step.microbatch)))
            if needed <= arrived:
                stage = stages[step.stage]
                running[device] = (now + case.launch + (stage.backward if step.backward else stage.forward), step)
                order.pop(0)
        now += 1
    return end


@pytest.mark.parametrize("seed", range(150))
def test_random_pipelines_match_a_simulation_in_ticks(seed):
    generator = random.Random(seed)
    devices, rounds = generator.randint(1, 4), generator.randint(1, 3)
    name = generator.choice(sorted(SCHEDULES))
    count = devices * (generator.randint(1, 3) if name == "interleaved" else 1)
    cold = generator.choice([0, 0, generator.randint(0, count - 1)])
    stages = [
        Cost(forward=generator.randint(1, 5), backward=generator.randint(1, 7), output=2 * generator.randint(0, 3))
        for _ in range(count)
    ]
    case = pipeline(
        [freeze(stage) if i < cold else stage for i, stage in enumerate(stages)],
        devices * rounds,
        SCHEDULES[name],
        devices,
        link=generator.choice([Link(), Link(1), Link(1, 2), Link(2, 1)]),
        launch=generator.choice([0, 1]),
        prologue=generator.choice([0, 0, 6]),
    )
    result = simulate(case)
    assert result.computed == ticks(case)
    assert all(seconds <= result.computed for seconds in result.busy)
    assert 0 <= result.bubble < 1


def test_gradients_of_stages_follow_each_other_on_the_link_between_replicas():
    """A ring of R replicas sends 2 (R - 1) / R of the bytes. The last stage is first to have its gradients."""
    stages = [Cost(forward=1, backward=1, gradients=40), Cost(forward=1, backward=1, gradients=80)]
    result = simulate(pipeline(stages, 3, gpipe, replicas=4, replica_link=Link(10, 1)))
    # Computation ends after 2 (3 + 2 - 1) slots, one earlier in the last stage. Then 6 messages of 20 bytes, 6 of 10.
    assert result.computed == 8
    assert result.seconds == 7 + 6 * 3 + 6 * 2
    assert simulate(pipeline(stages, 3, gpipe)).seconds == 8


def test_frozen_stages_have_neither_backward_passes_nor_stored_activations():
    stages = [freeze(EQUAL), EQUAL]
    result = simulate(pipeline(stages, 2, gpipe, replicas=2, replica_link=Link(1)))
    assert result.busy == (2, 6)
    assert result.microbatches == (0, 2)
    assert result.memory == (7, 31 + 10)
    assert result.seconds == 1 + 2 + 4 + 11  # only the trained stage averages gradients


def test_stages_are_sums_of_units_for_a_micro_batch():
    units = [
        Cost(forward=1, backward=2, stored=3, output=4, weights=5, gradients=6, moments=7),
        Cost(forward=10, backward=20, stored=30, output=40, weights=50, gradients=60, moments=70),
        EQUAL,
    ]
    first, second = merge(units, (0, 2, 3), 3)
    assert first == Cost(forward=33, backward=66, stored=99, output=120, weights=55, gradients=66, moments=77)
    assert second == Cost(forward=3, backward=6, stored=15, weights=7, gradients=11, moments=13)


def test_schedules_refuse_what_they_cannot_order():
    with pytest.raises(UserError, match="one stage per device, not 4 on 2"):
        one_forward_one_backward(0, 2, 4, 4)
    for stages, microbatches in ((5, 4), (4, 5)):
        with pytest.raises(UserError, match="choose multiples of 2"):
            interleaved(0, 2, stages, microbatches)
