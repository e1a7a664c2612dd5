"""Exits of commands that train: interrupted, stopped by a scheduler, or with failed runs."""

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
    """Exit after Ctrl-C or a scheduler's signal, with a message about how to resume.

    Args:
        folder: folder of the checkpoints and finished runs.
        command: command that resumes; None is this command with `--resume`.
    """
    try:
        yield
    except KeyboardInterrupt:
        _print_how_to_resume("interrupted", folder, command)
        raise typer.Exit(launching.INTERRUPTED) from None
    except BaseException as error:
        from powernorm_lab.engine.stopping import EXIT_CODE, Stopped, ignore_until_exit

        if not isinstance(error, Stopped):
            raise
        ignore_until_exit()
        _print_how_to_resume(f"stopped ({error})", folder, command)
        raise typer.Exit(EXIT_CODE) from None


@contextmanager
def results_printed(folder: Path, *, as_json: bool) -> Iterator[None]:
    """Print only results.json, after the block, if `as_json` is set.

    Args:
        folder: folder of the comparison that the block makes.
        as_json: whether to print it.
    """
    # Output of a user's function must not mix with the JSON.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield
    if as_json and launching.is_main():
        typer.echo((folder / RESULTS_FILE).read_text(encoding="utf-8"), nl=False)


def end_with_failures(
    folder: Path, command: str = "the same command", only: Collection[str] | None = None
) -> None:
    """Exit with the code of failures if runs failed, with a message about the first.

    Args:
        folder: folder of the comparison.
        command: command that retries them, without `--resume`.
        only: folder names of the requested runs; None is all.
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
        "with --resume retries them",
        err=True,
    )
    raise typer.Exit(launching.FAILED)


def resuming_command() -> str:
    """Return the command that resumes this one."""
    kept = (part for part in sys.argv[1:] if part not in ("--force", "--resume", "--accept-edits"))
    return f"{shlex.join(['powernorm', *kept])} --resume"


def _print_how_to_resume(what: str, folder: Path, command: str | None) -> None:
    if launching.is_launched():
        return  # the launching process prints it, once
    if folder.exists():
        typer.echo(
            f"{what}: {folder} has the finished runs and the last checkpoint; "
            f"resume with: {command or resuming_command()}",
            err=True,
        )
    else:
        typer.echo(f"{what}: nothing was trained yet; start the command again", err=True)
