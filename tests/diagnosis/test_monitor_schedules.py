from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powernorm.diagnosis import Schedule
from refusals import refuses


@given(st.integers(1, 500), st.integers(0, 10**6))
def test_every(every: int, step: int) -> None:
    assert Schedule.of(every).is_due(step) == (step % every == 0)


@pytest.mark.parametrize("per_decade", [1, 3, 10, 20])
def test_logarithmic_steps_are_the_rounded_powers(per_decade: int) -> None:
    schedule = Schedule(per_decade=per_decade)
    expected = {0} | {round(10 ** (i / per_decade)) for i in range(5 * per_decade)}
    due = {step for step in range(20_000) if schedule.is_due(step)}
    assert due == {step for step in expected if step < 20_000}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (10, Schedule(every=10)),
        ("10", Schedule(every=10)),
        ("log", Schedule(per_decade=10)),
        ("log:4", Schedule(per_decade=4)),
        (Schedule(every=3), Schedule(every=3)),
    ],
)
def test_parsing(value: Any, expected: Schedule) -> None:
    assert Schedule.of(value) == expected
    assert Schedule.of(str(expected)) == expected


@pytest.mark.parametrize("value", [0, -1, 2.5, None, True, "", "log:0", "log:x", "every", "-3"])
def test_bad_values(value: Any) -> None:
    refuses(r"every is .*expected a number of steps .*'log'", Schedule.of, value)


def test_exactly_one() -> None:
    refuses("either every or per_decade", Schedule)
    refuses("either every or per_decade", Schedule, 1, 1)
    refuses("per_decade is 0", Schedule, per_decade=0)
