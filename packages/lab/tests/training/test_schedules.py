import math

import pytest

from powernorm_lab.settings.training import ScheduleName, ScheduleSettings
from powernorm_lab.training.optimization import rate_factor

MAX_STEPS, WARMUP = 100, 20


def factor(name: ScheduleName, step: int, *, final: float = 0.0, warmup: float = 0.2) -> float:
    schedule = ScheduleSettings(name=name, warmup_fraction=warmup, final_fraction=final)
    return rate_factor(schedule, step, MAX_STEPS)


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt", "linear", "cosine"])
def test_warmup_rises_linearly_to_the_highest_rate(name: ScheduleName) -> None:
    rates = [factor(name, step) for step in range(WARMUP)]
    assert rates == pytest.approx([(step + 1) / WARMUP for step in range(WARMUP)])
    assert max(factor(name, step) for step in range(MAX_STEPS)) == 1.0


def test_formulas_after_warmup() -> None:
    for update in range(WARMUP + 1, MAX_STEPS + 1):
        progress = (update - WARMUP) / (MAX_STEPS - WARMUP)
        step = update - 1
        assert factor("constant", step) == 1
        assert factor("inverse_sqrt", step) == pytest.approx(math.sqrt(WARMUP / update))
        assert factor("linear", step, final=0.1) == pytest.approx(1 - 0.9 * progress)
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        assert factor("cosine", step, final=0.1) == pytest.approx(cosine)


@pytest.mark.parametrize(("name", "final"), [("linear", 0.0), ("cosine", 0.0), ("linear", 0.25)])
def test_last_update_has_the_final_rate(name: ScheduleName, final: float) -> None:
    assert factor(name, MAX_STEPS - 1, final=final) == pytest.approx(final, abs=1e-12)


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_extreme_warmups_stay_finite(name: ScheduleName, warmup: float) -> None:
    rates = [factor(name, step, warmup=warmup) for step in range(MAX_STEPS)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert max(rates) == 1
