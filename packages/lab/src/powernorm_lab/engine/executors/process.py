"""`powernorm work` as a process of this machine, and the meaning of its exit code."""

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from powernorm.files import check_own, remove
from powernorm_lab.engine.coordination import WorkerEnd
from powernorm_lab.engine.stopping import EXIT_CODE

BAD_INPUT: Final = 2
"""Exit code of `powernorm` after an InputError."""
COMMAND: Final = [sys.executable, "-m", "powernorm"]
LOG_FOLDER: Final = "workers"
_TAIL: Final = 4096
"""Number of bytes at the end of a worker's log that are searched for its last line."""


@dataclass(frozen=True)
class RunSize:
    """Resources that a run needs."""

    num_threads: int
    """CPU threads of each of its processes."""
    num_processes: int = 1
    """Number of processes that train it together; on CUDA each has its own GPU."""

    @property
    def num_cores(self) -> int:
        """Number of CPU cores of a run."""
        return self.num_threads * self.num_processes

    def num_gpus(self, device: torch.device) -> int:
        """Return the number of GPUs of a run on a device."""
        return self.num_processes if device.type == "cuda" else 0


def log_file(out: Path, name: str) -> Path:
    """Return the path of a worker's log; the file exists once the worker has started."""
    return out / LOG_FOLDER / f"{name}.log"


def stop_file(out: Path, name: str) -> Path:
    """Return the path of the file that asks a worker to finish its step, save and exit.

    Workers that signals cannot reach poll for it.
    """
    return out / LOG_FOLDER / f"{name}.stop"


def make_ready(out: Path, name: str) -> None:
    """Create the log folder, and remove files of an earlier worker of the same name."""
    check_own(out / LOG_FOLDER)
    (out / LOG_FOLDER).mkdir(exist_ok=True)
    remove(log_file(out, name), stop_file(out, name))


class QueuedWorker(ABC):
    """A worker that a cluster starts; it may wait in a queue, and signals cannot reach it.

    Args:
        name: name of the worker.
        out: folder of the comparison.
    """

    def __init__(self, name: str, out: Path) -> None:
        self.name = name
        self._out = out

    def stop(self) -> None:
        """Ask the worker to finish its step, save and exit; end it if it is still in the queue."""
        stop_file(self._out, self.name).touch()
        if not log_file(self._out, self.name).exists():
            self.kill()

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""


def start_process(
    out: Path, name: str, size: RunSize, **environment: str
) -> "subprocess.Popen[bytes]":
    """Start a worker.

    The worker exits when this process ends: it reads from a pipe, which then closes.

    Args:
        out: folder of the comparison.
        name: name of the worker.
        size: resources of its runs.
        environment: additional environment variables.
    """
    together = ["--devices", str(size.num_processes)] if size.num_processes > 1 else []
    with log_file(out, name).open("ab") as log:
        # A new session: signals such as Ctrl-C reach only this process, which forwards them.
        return subprocess.Popen(
            [*COMMAND, "work", str(out), "--worker", name, *together],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(size.num_threads)} | environment,
            start_new_session=True,
        )


def end_of(code: int, log: Path) -> WorkerEnd:
    """Return how a worker ended, from its exit code.

    Args:
        code: exit code; negative for a signal.
        log: path of the worker's log.
    """
    if code == 0:
        return WorkerEnd("left", "")
    if code == EXIT_CODE:
        return WorkerEnd("stopped", "")
    if code == BAD_INPUT:
        return WorkerEnd("failed", _last_line(log).removeprefix("error: "))
    if code < 0:
        try:
            how = signal.Signals(-code).name
        except ValueError:
            how = f"signal {-code}"
    else:
        how = f"exit code {code}: {_last_line(log)}"
    return WorkerEnd("lost", f"{how}; see {log}")


def _last_line(log: Path) -> str:
    check_own(log)
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {log}"
