"""Handling of SIGTERM and SIGUSR1, by which schedulers request a stop: finish the step and save."""

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
"""Exit code after a requested stop (EX_TEMPFAIL: start the same command again)."""


class Stopped(SystemExit):
    """A run was stopped by a signal; `resume` continues it from its last checkpoint.

    It is not an `Exception`, so that training functions that catch exceptions do not swallow it. A
    script that does not catch it exits with `EXIT_CODE`.
    """

    def __init__(self, reason: str = "asked to stop by the scheduler") -> None:
        super().__init__(reason)
        self.code = EXIT_CODE


def ignore_until_exit() -> None:
    """Ignore further signals, so that they do not change the exit code while Python exits."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Stop:
    """Whether a scheduler has asked this process to stop.

    Inside `watching`, a signal raises `Stopped` at once, unless a loop has promised by `defer` to
    call `check` soon. A second signal raises it in any case. Ctrl-C raises `KeyboardInterrupt` at
    once, as usual. The raised exception is remembered, because a training function may swallow it
    or raise another one.
    """

    def __init__(self) -> None:
        self.was_asked = False
        """Whether this process received a signal."""
        self._deferring = False
        self._ignores = False
        self._raised: BaseException | None = None
        self._process = os.getpid()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals inside the block; only the main thread receives any.

        Exceptions of signals are raised even if a library has swallowed or replaced them.
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
            # The process exits; a second signal must not change the exit code.
            self.ignore()
            raise
        finally:
            for number, handler in before.items():
                if not (self._ignores and number in SIGNALS):
                    # None: the handler was not installed from Python and cannot be restored.
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def install(self) -> None:
        """Install the handlers, also over those that a library has installed meanwhile."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def ignore(self) -> None:
        """Ignore all further signals: the process is about to exit."""
        self._ignores = True

    def defer(self, *, until_asked: bool) -> None:
        """Defer the next signal to `check`, or raise it at once again."""
        self._deferring = until_asked

    def check(self) -> None:
        """Stop if any process was asked to; all processes must call this.

        Raises:
            Stopped: a process was asked to stop.
        """
        if any_process(self.was_asked)[0]:
            raise Stopped

    @contextmanager
    def never_hidden(self) -> Iterator[None]:
        """Raise a signal's exception at the end of the block, even if the block swallowed it.

        The block may also raise another error because of the signal, such as a DataLoader whose
        workers the signal has ended.
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
            # A process that the training function has forked, such as a pool's worker.
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
