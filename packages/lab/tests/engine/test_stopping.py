"""A scheduler's signal is deferred to the end of the step, but no longer."""

from __future__ import annotations

import os
import signal

import pytest

from powernorm_lab.engine.stopping import SIGNALS, Stop, Stopped


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_between_steps_raises_at_once(number: signal.Signals) -> None:
    with pytest.raises(Stopped, match=number.name), Stop().watching():
        os.kill(os.getpid(), number)


def _signal_twice(stop: Stop, number: signal.Signals) -> None:
    stop.defer(until_asked=True)
    stop.check()
    os.kill(os.getpid(), number)
    with pytest.raises(Stopped, match="by the scheduler"):
        stop.check()
    os.kill(os.getpid(), number)  # a second signal is not deferred


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_a_step_waits_until_it_is_asked_for(number: signal.Signals) -> None:
    stop = Stop()
    with pytest.raises(Stopped, match=number.name), stop.watching():
        _signal_twice(stop, number)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop().watching():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_stop_is_no_error_that_a_function_may_catch() -> None:
    assert not issubclass(Stopped, Exception)


def _build(number: signal.Signals) -> None:
    try:
        os.kill(os.getpid(), number)
    except Stopped:
        raise ValueError("no schema can be built") from None


def test_what_a_library_makes_of_a_signal_is_a_stop() -> None:
    with pytest.raises(Stopped, match="SIGTERM"), Stop().watching():
        _build(signal.SIGTERM)
