"""Processes of tests that wait for something and are stopped from outside."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

from commands import SECONDS


def wait_until(is_so: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for a condition, for at most `SECONDS` and while the process runs, if one is given."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)


CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGKILL: -9}
"""Exit codes of a command by the signal that ended it."""


def stopped(
    process: subprocess.Popen[str], number: signal.Signals, is_ready: Callable[[], object]
) -> str:
    """Send a signal to a command when it is ready, and return what it wrote to stderr."""
    wait_until(is_ready, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == CODES[number], err
    return err
