import json
import math

import pytest

from limner.optim.schedules import Anneal, Constant, Cosine, MultiStep, Plateau, cooldown, cosine, warmup
from limner.recipes.presets import clip


def test_warmup_is_linear_from_the_first_step() -> None:
    assert [warmup(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup(0, 0) == 1


def test_cooldown_is_linear_to_the_last_step() -> None:
    assert [cooldown(step, 10, 4) for step in range(4, 10)] == [1, 1, 1, 0.75, 0.5, 0.25]
    assert cooldown(10, 10, 4) == 0 and cooldown(9, 10, 0) == 1


@pytest.mark.parametrize(("start", "end"), [(0.0, 6.6), (1.0, 1 / 16), (1e-4, 1.25e-6)])
def test_cosine_meets_its_ends_and_is_monotone(start: float, end: float) -> None:
    values = [cosine(step, start, end, 100) for step in range(130)]
    assert values[0] == pytest.approx(start) and values[50] == pytest.approx((start + end) / 2)
    assert all(v == pytest.approx(end) for v in values[100:])
    assert sorted(values, reverse=start > end) == values
    assert cosine(0, start, end, 0) == pytest.approx(end)
    assert Anneal(start=start, end=end, steps=100)(37) == values[37]


def test_schedules_are_factors() -> None:
    assert Constant().build(10).factor(7) == 1
    assert Cosine(end=1 / 80).build(10).factor(0) == 1
    assert Cosine(end=1 / 80).build(10).factor(10) == pytest.approx(1 / 80)
    assert Cosine(steps=5).build(10).factor(5) == pytest.approx(0)


def test_plateau_halves_when_the_loss_stops_falling_and_only_then() -> None:
    config = Plateau(window=10, patience=2, threshold=1e-3, halvings=5)
    falling = config.build(0)
    for step in range(1000):
        falling.observe(-step / 100)  # through zero, to negative losses
    assert falling.factor(0) == 1
    flat = config.build(0)
    for _ in range(10 + 2 * 10):
        flat.observe(1.0)
    assert flat.factor(0) == 0.5
    for _ in range(10_000):
        flat.observe(1.0)
    assert flat.factor(0) == 1 / 32  # five times, as in B.2


def test_plateau_resumes_from_its_state() -> None:
    losses = [1 + math.sin(i) / (1 + i / 30) for i in range(400)]
    whole = Plateau(window=7).build(0)
    factors = []
    for loss in losses:
        whole.observe(loss)
        factors.append(whole.factor(0))
    parts = Plateau(window=7).build(0)
    for i, loss in enumerate(losses):
        if i % 13 == 0:  # through JSON into a new schedule
            state = json.loads(json.dumps(parts.state_dict()))
            parts = Plateau(window=7).build(0)
            parts.load_state_dict(state)
        parts.observe(loss)
        assert parts.factor(0) == factors[i]
    assert factors[-1] < 1


def test_the_learning_rate_reaches_its_base_value_after_the_warm_up_and_then_falls() -> None:
    training = clip("B").contrastive.training
    steps, warm = training.steps, training.warmup_steps
    schedule = training.schedule.build(steps - warm)
    factors = {step: warmup(step, warm) * schedule.factor(step - warm) for step in (warm - 1, warm, steps)}
    assert (steps, warm) == (20_000, 5_000) and factors[warm - 1] == factors[warm] == 1  # §3.2
    assert factors[steps] == pytest.approx(0) and schedule.factor((steps - warm) // 2) == pytest.approx(0.5)


def test_multi_step_divides_by_ten_at_each_milestone():
    """SSD300's 120 epochs, with steps after 80 and 110."""
    schedule = MultiStep().build(120)
    assert [schedule.factor(step) for step in (-1, 0, 79, 80, 109, 110, 500)] == pytest.approx(
        [1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    )
