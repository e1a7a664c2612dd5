"""Run one command in several processes of this machine, each on its own device."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import typer

from powernorm.cli.launching import BAD_INPUT, LOST_ANOTHER
from powernorm.cli.launching import FAILED as FAILED
from powernorm.cli.launching import INTERRUPTED as INTERRUPTED
from powernorm.cli.launching import is_launched as is_launched
from powernorm.cli.launching import is_main as is_main
from powernorm.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

OPTION: Final = "--devices"


def launch(num_processes: int, arguments: list[str], resume_hint: str) -> int:
    """Run `powernorm` with these arguments in several processes and wait for them.

    When a process is lost, the others are stopped, as by `torchrun`.

    Args:
        num_processes: number of processes.
        arguments: arguments of the command line, without `--devices`.
        resume_hint: command that resumes the work.

    Returns:
        The exit code: 0; 1 if a process was lost or failed, 2 for bad input, 130 after Ctrl-C.
    """
    import uuid

    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from powernorm_lab.engine.executors.local import available_cores
    from powernorm_lab.engine.stopping import EXIT_CODE

    _silence("torch.distributed.elastic")
    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus < num_processes:
        raise InputError(
            f"{OPTION} {num_processes}, but this machine has {num_gpus} GPUs: give at most that"
        )
    if not num_gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // num_processes)))
    # By torchelastic's default, SIGUSR1 would end this process and leave the others running.
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "powernorm", *arguments)
    except ChildFailedError as error:
        rank = first_to_fail(error.failures)
        failure = error.failures[rank]
        if failure.exitcode in (BAD_INPUT, INTERRUPTED):
            # The process has printed the reason, or the user pressed Ctrl-C.
            return int(failure.exitcode)
        if failure.exitcode == EXIT_CODE:
            typer.echo(f"stopped by the scheduler; resume with: {resume_hint}", err=True)
            return EXIT_CODE
        how = (
            f"failed (exit code {failure.exitcode})"
            if failure.exitcode > 0
            else f"was lost ({failure.signal_name()})"
        )
        typer.echo(
            f"error: process {rank} of {num_processes} {how}, and the others were stopped; resume "
            f"with: {resume_hint}",
            err=True,
        )
        return FAILED
    except SignalException as error:
        if error.sigval in (signal.SIGTERM, getattr(signal, "SIGUSR1", None)):
            typer.echo(f"stopped by the scheduler; resume with: {resume_hint}", err=True)
            return EXIT_CODE
        typer.echo(f"interrupted; resume with: {resume_hint}", err=True)
        return INTERRUPTED
    except KeyboardInterrupt:
        typer.echo(f"interrupted; resume with: {resume_hint}", err=True)
        return INTERRUPTED
    return 0


def first_to_fail(failures: Mapping[int, "ProcessFailure"]) -> int:
    """Return the rank of the process that failed first and stopped the others.

    Timestamps are whole seconds, in which other processes may have ended, too: by SIGTERM, which
    stops them, with their exit code after it, or because their communication failed.

    Args:
        failures: failures by rank.
    """
    from powernorm_lab.engine.stopping import EXIT_CODE

    later = {-signal.SIGTERM: 1, EXIT_CODE: 1, LOST_ANOTHER: 2}
    return min(
        failures,
        key=lambda rank: (
            later.get(failures[rank].exitcode, 0),
            failures[rank].timestamp,
            rank,
        ),
    )


def _silence(package: str) -> None:
    """Disable the logs of a package, whose long messages `launch` summarizes in a line."""
    import logging

    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
