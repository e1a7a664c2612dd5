"""SIGTERM and SIGUSR1, with which a scheduler announces the end: finish the step, save, leave."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.engine.processes import any_process

SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
EXIT_CODE: Final = 75
"""Exit code after a stop from outside (EX_TEMPFAIL: start the same command again)."""


class Stopped(SystemExit):
    """A run was stopped from outside; what it had saved goes on with `resume`.

    No `Exception`: a training function that catches those must not swallow it. A script that does
    not catch it ends with `EXIT_CODE`.
    """

    def __init__(self, reason: str = "asked to stop by the scheduler") -> None:
        super().__init__(reason)
        self.code = EXIT_CODE


def ignore_until_exit() -> None:
    """Let no second signal end this process, or change its exit code, while Python ends it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Stop:
    """Whether a scheduler has asked this process to stop.

    Inside `watching`, a signal raises `Stopped` where Python is, unless a loop has promised by
    `defer` that it will call `check` soon. A second signal does not wait for it. Ctrl-C
    raises `KeyboardInterrupt` at once, as ever. What was raised is kept, for a training function
    may swallow it or let another exception follow.
    """

    def __init__(self) -> None:
        self.was_asked = False
        """Whether this process was."""
        self._deferring = False
        self._ignores = False
        self._raised: BaseException | None = None
        self._process = os.getpid()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Answer the signals inside the block; elsewhere than in the main thread none come.

        What they raise is never hidden: a library that builds something may fail by it otherwise.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
        self.install()
        if callable(before[signal.SIGINT]):  # not ignored, as in a script's background
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            with self.never_hidden():
                yield
        except Stopped:
            # The process ends; a second signal must not cost the exit code by which it goes on.
            self.ignore()
            raise
        finally:
            for number, handler in before.items():
                if not (self._ignores and number in SIGNALS):
                    # None is one that Python cannot give back.
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def install(self) -> None:
        """Take the signals, also from a library that has taken them in the meantime."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def ignore(self) -> None:
        """Let signals that still come do nothing, for good: the process is about to end."""
        self._ignores = True

    def defer(self, *, until_asked: bool) -> None:
        """Let the next signal wait for `check`, or no longer."""
        self._deferring = until_asked

    def check(self) -> None:
        """Stop where any of the processes was asked to; all of them call this.

        Raises:
            Stopped: one was.
        """
        if any_process(self.was_asked)[0]:
            raise Stopped

    @contextmanager
    def never_hidden(self) -> Iterator[None]:
        """Raise in the end what a signal raised inside the block, or what it was about to.

        A block may swallow it, or fail by it in another way, as a loader does whose workers the
        signal has ended, too.
        """
        try:
            yield
        except (InputError, KeyboardInterrupt, Stopped):
            raise
        except (Exception, SystemExit) as error:
            if self._raised is not None:
                raise self._raised from error
            if self.was_asked:
                raise Stopped from error
            raise
        if self._raised is not None:
            raise self._raised

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._process:
            # A process that the training function has forked, such as one of a pool.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._ignores:
            pass
        elif self.was_asked or not self._deferring:
            self.was_asked = True
            self._raised = Stopped(signal.Signals(number).name)
            raise self._raised
        else:
            self.was_asked = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._raised = KeyboardInterrupt()
        signal.default_int_handler(number, frame)
