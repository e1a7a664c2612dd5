"""`powernorm work`: train runs of a comparison in another process."""

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
            metavar="DIR", help="Comparison that `powernorm compare` has started or planned."
        ),
    ],
    devices: Annotated[int, options.devices()] = 1,
    accept_edits: options.AcceptEdits = False,
    quiet: options.Silent = False,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train runs of a comparison that no other process trains, until all are finished.

    Start any number of them, on every machine with access to the folder: each takes one free run
    after the other, and continues the runs of lost processes. SIGTERM and SIGUSR1 stop it after the
    current step with exit code 75; the same command continues.
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
        found = f"importing code that {folder} names: {', '.join(named)}"
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
        failed = f" ({num_failed} failed: `compare … --resume` retries them)" * bool(num_failed)
        typer.echo(f"no run is left{failed}; the table: powernorm report {folder}")
        if num_failed and not launching.is_launched():
            raise typer.Exit(launching.FAILED)


def _end_with_parent() -> None:
    """Stop as after a scheduler's signal when the parent process ends.

    The pipe from the parent then closes. In a launched group, the parent's id changes instead.
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
    """Stop as after a scheduler's signal when an executor has written its stop file."""
    if launching.is_launched():
        return  # the launching process checks for it
    from powernorm_lab.engine.executors.local import stop_file

    file = stop_file(folder, name)

    def wait() -> None:
        while not file.exists():
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="asked", daemon=True).start()
