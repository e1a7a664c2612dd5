"""How commands that train end: interrupted, stopped by a scheduler, or with runs that failed."""

import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import typer

from powernorm.errors import printable
from powernorm_lab.cli import launching
from powernorm_lab.runs import RESULTS_FILE, ComparisonResults


@contextmanager
def interruptible(folder: Path, command: str | None = None) -> Iterator[None]:
    """Say after Ctrl-C or a scheduler's signal what is kept and how it goes on, and leave.

    Args:
        folder: that keeps it.
        command: that goes on; None is this one with `--resume`.
    """
    try:
        yield
    except KeyboardInterrupt:
        _say_how_to_go_on("interrupted", folder, command)
        raise typer.Exit(launching.INTERRUPTED) from None
    except BaseException as error:
        from powernorm_lab.engine.stopping import EXIT_CODE, Stopped, ignore_until_exit

        if not isinstance(error, Stopped):
            raise
        ignore_until_exit()
        _say_how_to_go_on(f"stopped ({error})", folder, command)
        raise typer.Exit(EXIT_CODE) from None


@contextmanager
def results_printed(folder: Path, *, as_json: bool) -> Iterator[None]:
    """Print results.json after the block, if it is asked for, and nothing else.

    Args:
        folder: of the comparison that the block makes.
        as_json: whether it is asked for.
    """
    # What a function of the user's own prints is no part of the JSON.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield
    if as_json and launching.is_main():
        typer.echo((folder / RESULTS_FILE).read_text(encoding="utf-8"), nl=False)


def end_with_failures(
    folder: Path, command: str = "the same command", only: Collection[str] | None = None
) -> None:
    """Leave with an exit code of its own where runs failed, after the table that says so, too.

    Args:
        folder: of the comparison.
        command: that tries them again, without `--resume`.
        only: names of the folders of the runs that were asked for; None is all that are there.
    """
    from powernorm_lab.engine.folders import READ_ANEW
    from powernorm_lab.schema import read_record

    runs = read_record(ComparisonResults, folder / RESULTS_FILE, READ_ANEW).runs
    runs = [run for run in runs if only is None or run.folder in only]
    failed = [run for run in runs if run.status == "failed"]
    if not failed:
        return
    first = failed[0]
    typer.echo(
        f"error: {len(failed)} of {len(runs)} runs failed, the first by "
        f"{printable(first.message or 'an error')} ({folder / first.folder}); {command} "
        "with --resume tries them again",
        err=True,
    )
    raise typer.Exit(launching.FAILED)


def resuming_command() -> str:
    """Return this command as the one that goes on with what it left."""
    kept = (part for part in sys.argv[1:] if part not in ("--force", "--resume", "--accept-edits"))
    return f"{shlex.join(['powernorm', *kept])} --resume"


def _say_how_to_go_on(what: str, folder: Path, command: str | None) -> None:
    if launching.is_launched():
        return  # who started this process says it, once
    if folder.exists():
        typer.echo(
            f"{what}: {folder} keeps what is over and the last checkpoint; "
            f"go on with: {command or resuming_command()}",
            err=True,
        )
    else:
        typer.echo(f"{what}: nothing was trained yet; start the command again", err=True)
