"""The command `powernorm`: start, errors and exit codes.

The commands are in `powernorm.cli.commands`, imported late, so that a missing extra gives a
one-line error that names it.
"""

import codecs
import errno
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, cast

from powernorm.errors import InputError, RepeatedInputError, printable

BAD_INPUT: Final = 2
"""Exit code after an InputError or a wrong option."""
INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as in shells."""
_LABORATORY_COMMANDS: Final = (
    *("compare", "data", "recipes", "remove", "report", "results", "tune", "work"),
)
"""Commands of another distribution, for the error that names it."""
_SHOWN: Final = 200
"""Maximum length of a path in an error."""
PIPE_CLOSED: Final = 141
"""Exit code after the reader of the output has closed it, such as `| head`: 128 + SIGPIPE, as in
shells. The signal itself stays off: it would end a training that writes to another process."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a stream that cannot be written to."""
_NO_PLACE: Final = (
    *_FULL,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP),
)
"""Errors of a file that cannot be written or found; most have an InputError of their own."""


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 2 bad input, 130 interrupted, 141 pipe closed."""
    _open_closed_streams()
    _escape_what_cannot_be_shown()
    # Let waiting OpenMP threads sleep, not spin: if other processes use the cores too, spinning
    # makes small models several times slower. torch reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    interrupts = _noted_interrupts()
    try:
        from powernorm.cli.commands import app

        code = _run(app)
        sys.stdout.flush()  # while errors can still be reported
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        sys.exit(PIPE_CLOSED)
    except Exception as error:
        if interrupts:
            sys.exit(INTERRUPTED)
        line = _line_of(error)
        if line is None:
            raise
        _fail(line)
    _drop_output()
    sys.exit(code)


def _noted_interrupts() -> list[int]:
    """Return a list that gets an item with every Ctrl-C that is to interrupt Python.

    A package that is being imported may turn the interrupt into an error of its own.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    return noted


def _line_of(error: Exception) -> str | None:
    """Return a line about an error of the user's input or machine; None for a bug of powernorm."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None and error.errno in _NO_PLACE:
        name = str(error.filename)
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"
        return f"{shown} cannot be used ({error.strerror}): give another path"
    if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
        return f"the output cannot be written ({error.strerror}): free space, or give another path"
    if isinstance(error, ModuleNotFoundError):
        from powernorm.integrations.extras import explained

        named = explained(error, "this command")
        return None if named is None else str(named)
    return None


def _open_closed_streams() -> None:
    """Replace closed standard streams by the null device.

    Otherwise a file that is opened later would get their number, and what is printed with it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _escape_what_cannot_be_shown() -> None:
    """Print characters that the output's encoding lacks as escapes like those of JSON."""

    def escaped(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    codecs.register_error("powernorm", escaped)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="powernorm")


def _drop_output() -> None:
    """Discard unwritten output, or Python would try again at exit and report the failure."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(app: Callable[..., Any]) -> int:
    """Run the command and return its exit code; one of several processes ends here, at once."""
    from powernorm.cli.launching import LOST_ANOTHER, is_launched, is_main, leave

    if not is_launched():
        return _called(app)
    try:
        leave(_called(app))
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else 1)
    except InputError as error:
        if isinstance(error, RepeatedInputError):
            leave(LOST_ANOTHER)  # the first process reports the problem, and how it ended
        who = "" if is_main() else f" in process {os.environ['RANK']}"
        print(f"error{who}: {printable(' '.join(str(error).split()))}", file=sys.stderr)  # noqa: T201
        leave(BAD_INPUT)
    except BaseException as error:
        if _is_lost_connection(error):
            # The launcher names the process that was lost.
            leave(LOST_ANOTHER)
        traceback.print_exc()
        leave(1)


def _called(app: Callable[..., Any]) -> int:
    """Return the exit code of the command.

    Raises:
        InputError: the command line is wrong; typer would report this in several lines.
        BrokenPipeError: the reader of the output has closed it.
    """
    import typer

    # By a public name: the module of the class is private or public depending on typer's version.
    usage_error = cast("type[Any]", typer.BadParameter.__base__)
    try:
        return int(app(prog_name="powernorm", standalone_mode=False) or 0)
    except typer.Abort:  # raised by older versions on Ctrl-C
        return INTERRUPTED
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            # typer ends silently, but as if the command had failed.
            raise error.__context__ from None
        raise
    except usage_error as error:
        message = error.format_message().rstrip(".")
        for name in _LABORATORY_COMMANDS:
            if message == f"No such command '{name}'":
                from powernorm.integrations.extras import LABORATORY, install_command

                raise InputError(
                    f"`powernorm {name}` is a command of {LABORATORY}, which is not installed: "
                    f"{install_command(LABORATORY)}"
                ) from None
        if "\n" in message:  # the help of a command without arguments
            error.show()
            return BAD_INPUT
        for option in getattr(getattr(error, "param", None), "opts", ()):
            message = message.replace(f"'{option}':", f"{_as_given(option)}:")
        command = "powernorm" if error.ctx is None else error.ctx.command_path
        message = f"{message[:1].lower()}{message[1:]}"
        raise InputError(f"{message}; see `{command} --help`") from None


def _as_given(option: str) -> str:
    """Return an option with its value, as on the command line."""
    for place, part in enumerate(sys.argv):
        if part == option:
            return " ".join(sys.argv[place : place + 2])
        if part.startswith(f"{option}="):
            return part
    return option


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether an exchange with another process failed, whose fault it is."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)


def _fail(message: str) -> NoReturn:
    _drop_output()
    with suppress(OSError):  # standard error may be on a full disk, too
        # One line of plain text, even if the message quotes a file.
        print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)  # noqa: T201
    _drop_output()
    sys.exit(BAD_INPUT)
