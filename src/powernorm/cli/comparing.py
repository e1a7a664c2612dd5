"""The comparison behind `powernorm compare`: here, or in several processes, and its report."""

import shlex
import sys
from pathlib import Path
from typing import NoReturn

import typer

from powernorm.cli.launching import INTERRUPTED, OPTION, is_launched, is_main, launch
from powernorm.errors import InputError
from powernorm.recipes import check_choice, measure_of, paper_records, reduced_note
from powernorm.training.config import ComparisonConfig


def compare_and_report(
    config: ComparisonConfig, folder: Path, *, resume: bool, force: bool, devices: int = 1
) -> None:
    """Train what a configuration says, print the table and write the page.

    Args:
        config: what to train.
        folder: of the comparison.
        resume: go on with the runs that it holds.
        force: delete them first.
        devices: processes on this machine.

    Raises:
        InputError: a setting, the text or the folder cannot be used.
        typer.Exit: a process was lost, or several were interrupted.
    """
    check_choice(config)
    if devices > 1:
        if is_launched():
            raise InputError(f"{OPTION} and torchrun both start processes: leave {OPTION} out.")
        from powernorm.training.comparison import check_norms

        # Before each process would find it.
        check_norms(config)
        arguments = _without_devices(sys.argv[1:])
        hint = [
            "powernorm",
            *(part for part in sys.argv[1:] if part not in ("--force", "--resume")),
        ]
        raise typer.Exit(launch(devices, arguments, f"{shlex.join(hint)} --resume"))
    from rich.console import Console

    # Before the training that takes minutes: a missing extra must not show up after it.
    from powernorm.report import print_comparison, read_comparison, write_report
    from powernorm.training.comparison import Notes, compare
    from powernorm.training.progress import ComparisonProgress

    measure = measure_of(config.task)
    notes = Notes(
        None if measure == "test_perplexity" else measure,
        tuple(paper_records(config)),
        reduced_note(config),
    )
    if not is_main():
        compare(config, folder, resume=resume, force=force, notes=notes)
        return
    with ComparisonProgress(Console(stderr=True)) as progress:
        compare(config, folder, resume=resume, force=force, on_event=progress, notes=notes)
    page = write_report(folder)
    print_comparison(Console(), read_comparison(folder))
    typer.echo(f"report: {page}")


def say_what_is_kept(folder: Path) -> NoReturn:
    """Say after Ctrl-C how the work goes on, and leave."""
    if is_launched():
        # Who started this process says it, once.
        raise typer.Exit(INTERRUPTED)
    if folder.exists():
        typer.echo(
            f"interrupted: {folder} keeps the runs that are over and the last checkpoint; "
            f"go on with: {resuming_command()}",
            err=True,
        )
    else:
        typer.echo("interrupted: nothing was trained yet; start the command again", err=True)
    raise typer.Exit(INTERRUPTED)


def resuming_command() -> str:
    """Return this command as the one that goes on with what it left."""
    kept = (part for part in sys.argv[1:] if part not in ("--force", "--resume"))
    return f"{shlex.join(['powernorm', *kept])} --resume"


def _without_devices(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith(f"{OPTION}="):
            skip = False
        elif argument == OPTION:
            skip = True
        else:
            kept.append(argument)
    return kept
