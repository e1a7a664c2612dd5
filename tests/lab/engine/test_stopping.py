"""A scheduler's signal waits for the end of the step, and no longer."""

from __future__ import annotations

import os
import signal

import pytest

from powernorm.lab.engine.stopping import SIGNALS, Stop, Stopped


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_between_steps_raises_at_once(number: signal.Signals) -> None:
    stop = Stop()
    with stop.watching(), pytest.raises(Stopped, match=number.name):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_a_step_waits_until_it_is_asked_for(number: signal.Signals) -> None:
    stop = Stop()
    with stop.watching():
        stop.defer(until_asked=True)
        stop.check()
        os.kill(os.getpid(), number)
        with pytest.raises(Stopped, match="by the scheduler"):
            stop.check()
        with pytest.raises(Stopped):  # a second one does not wait
            os.kill(os.getpid(), number)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop().watching():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_stop_is_no_error_that_a_function_may_catch() -> None:
    assert not issubclass(Stopped, Exception)
