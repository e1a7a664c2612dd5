"""`powernorm work`: one more process for the runs of a comparison."""

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Final

import typer

from powernorm.errors import printable
from powernorm_lab.cli import launching, options
from powernorm_lab.cli.ends import end_with_failures, interruptible

LOOK_SECONDS: Final = 0.5


def work(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Of a comparison that `powernorm compare` has begun, or planned."
        ),
    ],
    devices: Annotated[int, options.devices()] = 1,
    accept_edits: options.AcceptEdits = False,
    quiet: options.Silent = False,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train the runs of a comparison that nobody else trains, until all are over.

    Start it as often as you like, on every machine that sees the folder: each takes one free run
    after the other, and goes on with those of a process that was lost. SIGTERM and SIGUSR1 end it
    after the step at hand with exit code 75; the same command goes on.
    """
    from rich.console import Console

    from powernorm_lab.engine.progress import ComparisonProgress
    from powernorm_lab.working import named_code
    from powernorm_lab.working import work as train_free_runs

    if accept_edits:
        options.accept_edits(folder)
    if worker is not None:
        _end_with_parent()
        _end_when_asked(folder, worker)
    elif not launching.is_launched() and (named := named_code(folder)):
        found = f"{folder} names code, which is imported: {', '.join(named)}"
        typer.echo(printable(found), err=True)
    hint = f"powernorm work {folder}"
    if devices > 1:
        hint = f"{hint} {launching.OPTION} {devices}"
        by_name = [] if worker is None else ["--worker", worker]
        arguments = ["work", str(folder), *by_name, *(["--quiet"] if quiet else [])]
        code = launching.launch(devices, arguments, hint)
        if not code and worker is None:
            end_with_failures(folder, "`powernorm compare`")
        raise typer.Exit(code)
    console = Console(stderr=True)
    is_shown = not quiet and launching.is_main()
    with (
        interruptible(folder, hint),
        ComparisonProgress(console) if is_shown else nullcontext() as shown,
    ):
        num_failed = train_free_runs(folder, worker=worker, on_event=shown)
    if worker is None and launching.is_main():
        failed = f" ({num_failed} failed: `compare … --resume` tries them again)" * bool(num_failed)
        typer.echo(f"no run is left{failed}; the table: powernorm report {folder}")
        if num_failed and not launching.is_launched():
            raise typer.Exit(launching.FAILED)


def _end_with_parent() -> None:
    """Stop as by a scheduler when the process that started this one is gone.

    Its pipe closes then; one of several processes has that of another one, and a new parent.
    """
    parent = os.getppid()

    def wait() -> None:
        if launching.is_launched():
            while os.getppid() == parent:
                time.sleep(LOOK_SECONDS)
        else:
            while os.read(sys.stdin.fileno(), 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _end_when_asked(folder: Path, name: str) -> None:
    """Stop as by a scheduler when the file is there by which an executor asks for it."""
    if launching.is_launched():
        return  # who started this process looks for it
    from powernorm_lab.engine.executors.process import stop_file

    file = stop_file(folder, name)

    def wait() -> None:
        while not file.exists():
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="asked", daemon=True).start()
