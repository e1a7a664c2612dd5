"""`powernorm data`: list data sets, fetch and delete them, and print their paths."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from powernorm.cli.launching import INTERRUPTED
from powernorm.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from powernorm_lab.data.catalog import DataSet, Home

_DECLINED: Final = 1
"""Exit code if the user did not accept the rights of a data set."""
_TITLES: "Final[dict[Home, str]]" = {
    "embedded": "embedded: in the package powernorm-data",
    "fetched": "fetched on request: powernorm data get NAME",
    "own": "bring your own: the official files, on your disk",
}
_HERE: Final = {"whole": "here", "damaged": "damaged, get it again"}
_NOT_HERE: Final = {"absent": "not installed", "damaged": "damaged, install it again"}
_MEGABYTE: Final = 1e6

app = typer.Typer(rich_markup_mode=None)

_Names = Annotated[list[str], typer.Argument(metavar="NAME", help="See `powernorm data`.")]


@app.callback(invoke_without_command=True)
def _list(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="List them as JSON.")] = False,
) -> None:
    """List the data sets, and fetch those that can be fetched."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise InputError("--json is for the list, `powernorm data --json`: leave it out here")
        return
    if not as_json:
        _print_sets()
        return
    from powernorm_lab.data.catalog import SETS

    facts = [_facts(entry) for entry in SETS.values()]
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))


def _print_sets() -> None:
    """Print the data sets with their tasks, licenses and states."""
    from rich.console import Console
    from rich.text import Text

    from powernorm.integrations.extras import install_command
    from powernorm_lab.data.catalog import SETS, corpora_folder
    from powernorm_lab.data.fetching import sets_folder

    console = Console()
    for home, title in _TITLES.items():
        console.print(_table(title, [entry for entry in SETS.values() if entry.home == home]))
        console.print()
    if corpora_folder() is None:
        missing = f"powernorm-data is not installed: {install_command('powernorm-data')}"
        console.print(Text(missing), soft_wrap=True)
    console.print(Text(f"cache: {sets_folder()} (another one: POWERNORM_CACHE)"), soft_wrap=True)
    console.print(
        Text("use: powernorm compare TASK --data NAME, or --data PATH for your own files"),
        soft_wrap=True,
    )


def _table(title: str, entries: "Sequence[DataSet]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = Text(title), "left", "bold"
    for entry in entries:
        lines = [(_what(entry), ""), (f"license: {entry.license}; from {entry.source}", "dim")]
        if entry.usage != f"--data {entry.name}":
            lines.append((entry.usage, "dim"))
        table.add_row(
            Text(entry.name), Text("\n").join(Text(line, style=style) for line, style in lines)
        )
    return table


def _what(entry: "DataSet") -> str:
    from powernorm_lab.data.fetching import cached_state

    what = f"{', '.join(entry.tasks)}: {entry.summary}; {entry.amount}"
    state = cached_state(entry.name)
    if entry.home != "fetched":
        return what if state in (None, "whole") else f"[{_NOT_HERE[state]}] {what}"
    size = f"download {entry.download_size / _MEGABYTE:.0f} MB"
    return f"[{_HERE.get(str(state), size)}] {what}"


def _facts(entry: "DataSet") -> dict[str, object]:
    from powernorm_lab.data.fetching import cached_state, places

    state = cached_state(entry.name)
    has_none = entry.home == "own" or (entry.home == "embedded" and state == "absent")
    return {
        "name": entry.name,
        "home": entry.home,
        "tasks": list(entry.tasks),
        "summary": entry.summary,
        "amount": entry.amount,
        "license": entry.license,
        "source": entry.source,
        "usage": entry.usage,
        # Null for a set that the user brings, because only the user knows whether it exists.
        "state": state,
        "paths": [] if has_none else [str(path) for path in places(entry.name)],
        "download_bytes": entry.download_size if entry.home == "fetched" else None,
        "bytes": entry.size if entry.home == "fetched" else None,
        "rights": entry.rights,
    }


@app.command()
def get(
    names: _Names,
    accept: Annotated[
        bool,
        typer.Option("--accept", help="Accept the notes about unclear rights without being asked."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch existing data again.")] = False,
) -> None:
    """Fetch data sets into the cache.

    Each comes from a fixed address and is verified by a fixed checksum.
    """
    try:
        chosen, declined = _wanted(names, accept=accept, force=force)
        for entry in chosen:
            _fetch(entry, force=force)
    except KeyboardInterrupt:
        typer.echo("interrupted: completed data sets are kept, partial ones deleted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if declined:
        typer.echo(f"not fetched: {', '.join(declined)}", err=True)
        raise typer.Exit(_DECLINED)


def _wanted(
    names: Sequence[str], *, accept: bool, force: bool
) -> "tuple[list[DataSet], list[str]]":
    """Return the data sets to fetch and the names that the user declined; report existing ones.

    All questions are asked before the first download.
    """
    from powernorm_lab.data.fetching import cached_state, fetchable, places

    chosen, declined = [], []
    for entry in [fetchable(name) for name in dict.fromkeys(names)]:
        if not force and cached_state(entry.name, thorough=True) == "whole":
            typer.echo(f"{entry.name}: already here, {places(entry.name)[0]}")
        elif accept or _consents(entry):
            chosen.append(entry)
        else:
            declined.append(entry.name)
    return chosen, declined


def _consents(entry: "DataSet") -> bool:
    if entry.rights is None:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(
            f"the data set {entry.name} needs your consent: {entry.rights} This is not a terminal; "
            f"to accept, run: powernorm data get {entry.name} --accept"
        )
    # typer.confirm would write to standard output, which a script may read.
    typer.echo(f"{entry.name}: {entry.rights}\nDo you accept? [y/N] ", nl=False, err=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _fetch(entry: "DataSet", *, force: bool) -> None:
    """Fetch a data set that the user has consented to, with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from powernorm_lab.data.fetching import fetch, places

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        bar = progress.add_task(f"{entry.name}: downloading", total=entry.download_size)
        fetch(
            entry.name,
            accept=True,
            force=force,
            on_progress=lambda size: progress.advance(bar, size),
        )
    typer.echo(f"{entry.name}: {places(entry.name)[0]}")


@app.command()
def where(names: _Names) -> None:
    """Print the paths of data sets: folders of fetched ones, compressed files of embedded ones."""
    from powernorm_lab.data.fetching import check_here, places

    # All are checked before the first is printed, so that a script gets all paths or none.
    for name in names:
        check_here(name)
    for path in [path for name in names for path in places(name)]:
        typer.echo(str(path))


@app.command()
def remove(names: _Names) -> None:
    """Delete fetched data sets from the cache."""
    from powernorm_lab.data.fetching import fetchable
    from powernorm_lab.data.fetching import remove as delete

    for entry in [fetchable(name) for name in dict.fromkeys(names)]:
        typer.echo(f"{entry.name}: {'deleted' if delete(entry.name) else 'was not here'}")
