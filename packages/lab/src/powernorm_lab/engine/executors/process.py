"""`powernorm work` as a process of the machine at hand, and what its end says."""

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
"""Bytes of a worker's log in which its last line is looked for."""


@dataclass(frozen=True)
class RunSize:
    """What a run takes of the machine that it is trained on."""

    num_threads: int
    """CPU threads of each of its processes."""
    num_processes: int = 1
    """Processes that train it together; on CUDA each has a GPU of its own."""

    @property
    def num_cores(self) -> int:
        """CPU cores of a run."""
        return self.num_threads * self.num_processes

    def num_gpus(self, device: torch.device) -> int:
        """Return the GPUs of a run on a device."""
        return self.num_processes if device.type == "cuda" else 0


def log_file(out: Path, name: str) -> Path:
    """Return the file for what a worker prints; it is there once the worker has begun."""
    return out / LOG_FOLDER / f"{name}.log"


def stop_file(out: Path, name: str) -> Path:
    """Return the file whose presence asks a worker to finish its step, to save and to leave.

    For workers to which no signal can be sent: these look for it.
    """
    return out / LOG_FOLDER / f"{name}.stop"


def make_ready(out: Path, name: str) -> None:
    """Forget a worker of that name of an earlier call."""
    check_own(out / LOG_FOLDER)
    (out / LOG_FOLDER).mkdir(exist_ok=True)
    remove(log_file(out, name), stop_file(out, name))


class QueuedWorker(ABC):
    """A worker that a cluster starts: it may wait in a queue, and no signal reaches it.

    Args:
        name: of the worker.
        out: folder of the comparison.
    """

    def __init__(self, name: str, out: Path) -> None:
        self.name = name
        self._out = out

    def stop(self) -> None:
        """Ask it to finish its step, to save and to leave; end it where it waits in the queue."""
        stop_file(self._out, self.name).touch()
        if not log_file(self._out, self.name).exists():
            self.kill()

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""


def start_process(
    out: Path, name: str, size: RunSize, **environment: str
) -> "subprocess.Popen[bytes]":
    """Start a worker.

    It ends by itself when this process does: it reads a pipe that then closes.

    Args:
        out: folder of the comparison.
        name: of the worker.
        size: of its runs.
        environment: variables that it sees beside those of this process.
    """
    together = ["--devices", str(size.num_processes)] if size.num_processes > 1 else []
    with log_file(out, name).open("ab") as log:
        # A session of its own: Ctrl-C and a scheduler's signals go to this process, which tells it.
        return subprocess.Popen(
            [*COMMAND, "work", str(out), "--worker", name, *together],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(size.num_threads)} | environment,
            start_new_session=True,
        )


def end_of(code: int, log: Path) -> WorkerEnd:
    """Return what the exit code of a worker says.

    Args:
        code: negative for a signal.
        log: what it printed.
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
