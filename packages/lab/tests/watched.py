"""Commands in this process: their outcomes, including exceptions, and the files they write."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
SECONDS = 120
"""Time after which a command counts as hung."""
_CHANGING = (
    *("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "sqlite3.connect"),
)
_STARTING = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")


class Outcome:
    """Outcome of a command."""

    def __init__(self, code: int, out: str, err: str, raised: str, outside: list[str]) -> None:
        self.code, self.out, self.err = code, out, err
        self.raised = raised
        """Traceback of an uncaught exception."""
        self.outside = outside
        """Files written outside of the allowed folders, and started programs."""

    @property
    def error(self) -> str:
        """Return the line of an error, or "" for another outcome."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        is_one = self.code == 2 and len(lines) == 1 and self.err.endswith(f"{lines[0]}\n")
        return lines[0] if is_one else ""


class _Guard:
    """Audit hook that records writes outside of some folders; Python cannot remove such hooks.

    `opened` is called with the files that are opened for writing.
    """

    def __init__(self) -> None:
        self.allowed: Sequence[str] | None = None
        self.noted: list[str] = []
        self.opened: Callable[[str], None] | None = None
        self._is_hooked = False

    @contextmanager
    def armed(
        self, *allowed: Path, opened: Callable[[str], None] | None = None
    ) -> Iterator[list[str]]:
        if not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(self._hear)
        self.noted = []
        self.allowed = [os.path.realpath(one) for one in allowed]
        self.opened = opened
        try:
            yield self.noted
        finally:
            self.allowed = self.opened = None

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, mode, flags = args
            is_writing = (mode and set(mode) & set("wax+")) or (
                isinstance(flags, int)
                and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            )
            if is_writing and not isinstance(path, int):
                name = os.fsdecode(path)
                self._check(event, os.path.realpath(name))
                if self.opened is not None:
                    self.opened(name)
        elif event in _CHANGING:
            last = args[-1] if isinstance(args[-1], int) else -1
            paths = args[:2] if event in ("os.rename", "os.link") else args[:1]
            if event == "os.symlink":
                paths = args[1:2]
            for path in paths:
                if isinstance(path, str | bytes | os.PathLike):
                    self._check(event, _place(os.fsdecode(path), last))
        elif event in _STARTING:
            self.noted.append(f"{event} {str(args)[:200]}")

    def _check(self, event: str, name: str) -> None:
        assert self.allowed is not None
        inside = any(name == one or name.startswith(one + os.sep) for one in self.allowed)
        if not inside and name not in ("/dev/null", ":memory:") and "matplotlib" not in name:
            self.noted.append(f"{event} {name}")


def _place(name: str, folder: int) -> str:
    """Return the path itself, without following a link."""
    path = Path(name)
    if not path.is_absolute() and folder >= 0:
        path = Path(f"/proc/self/fd/{folder}").readlink() / path
    return str(path.parent.resolve() / path.name)


GUARD = _Guard()


class HungError(Exception):
    """A command did not end."""


def run_watched(
    folder: Path,
    action: Callable[[], Any],
    *allowed: Path,
    opened: Callable[[str], None] | None = None,
    seconds: int = SECONDS,
) -> Outcome:
    """Run an action in a folder; it may write there and into the `allowed` folders."""

    def ring(*_: Any) -> None:
        raise HungError(f"not over after {seconds} s")

    out, err = io.StringIO(), io.StringIO()
    before, handlers = set(sys.modules), {one: signal.getsignal(one) for one in SIGNALS}
    temporary = folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    code, raised = 0, ""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("COLUMNS", "80")
        signal.signal(signal.SIGALRM, ring)
        signal.alarm(seconds)
        with (
            warnings.catch_warnings(),
            GUARD.armed(folder, temporary, *allowed, opened=opened) as noted,
        ):
            warnings.simplefilter("ignore")
            try:
                action()
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(bool(error.code))
            except BaseException:
                code, raised = -1, traceback.format_exc()
            finally:
                signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _forget_modules(before, folder)
    return Outcome(code, out.getvalue(), err.getvalue(), raised, noted)


def _forget_modules(before: set[str], folder: Path) -> None:
    """Forget modules of the folder, so that a copy of it imports its own."""
    for name in sys.modules.keys() - before:
        module = sys.modules[name]
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
        if any(place and Path(place).is_relative_to(folder) for place in places):
            del sys.modules[name]


def command(*parts: str | Path) -> Callable[[], None]:
    """Return `powernorm …` as an action."""

    def called() -> None:
        from powernorm.cli import main

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["powernorm", *map(str, parts)])
            main()

    return called
