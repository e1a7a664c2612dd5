"""SIGTERM and SIGUSR1, with which a scheduler announces the end: finish the step, save, leave."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from powernorm.lab.engine.processes import any_process

SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
EXIT_CODE: Final = 75
"""Exit code after a stop from outside (EX_TEMPFAIL: start the same command again)."""


class Stopped(BaseException):
    """A run was stopped from outside; what it had saved goes on with `resume`.

    No `Exception`: a training function that catches those must not swallow it.
    """


class Stop:
    """Whether a scheduler has asked this process to stop.

    Inside `watching`, a signal raises `Stopped` where Python is, unless a loop has promised by
    `deferring` that it will ask `is_requested` soon. A second signal does not wait for it.
    """

    def __init__(self) -> None:
        self._requested = False
        self._deferring = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Answer the signals inside the block; elsewhere than in the main thread none come."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals, also from a library that has taken them in the meantime."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def defer(self, *, until_asked: bool) -> None:
        """Let the next signal wait for `is_requested`, or no longer."""
        self._deferring = until_asked

    @property
    def is_deferred(self) -> bool:
        """Whether a signal waits for `is_requested`."""
        return self._deferring

    def is_requested(self) -> bool:
        """Return whether any of the processes was asked to stop; all of them call this."""
        return any_process(self._requested)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._requested or not self._deferring:
            raise Stopped(signal.Signals(number).name)
        self._requested = True
