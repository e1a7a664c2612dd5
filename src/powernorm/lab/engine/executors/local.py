"""Workers that are processes of this machine, each on a GPU or on CPU threads of its own."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import torch

from powernorm.errors import InputError
from powernorm.lab.engine.coordination import WorkerEnd
from powernorm.lab.engine.executors.process import end_of, log_file, make_ready, start_process

GPUS: Final = "CUDA_VISIBLE_DEVICES"


class LocalExecutor:
    """Starts `powernorm work` in processes of this machine.

    Args:
        out: folder of the comparison; what the workers print goes to `workers/` in it.
        num_workers: at a time.
        num_threads: CPU threads of each.
        device: of the runs; on `cuda` each worker sees one GPU.
        retries: so often a run is tried again whose worker was lost.

    Raises:
        InputError: there are not so many cores, or GPUs.
    """

    def __init__(
        self,
        out: Path,
        num_workers: int,
        *,
        num_threads: int,
        device: torch.device,
        retries: int = 3,
    ) -> None:
        self.num_workers = num_workers
        self.retries = retries
        self._out = out.absolute()
        self._num_threads = num_threads
        self._free_gpus: list[str] | None = None
        check_cores(num_workers, num_threads)
        if device.type == "cuda":
            self._free_gpus = _visible_gpus()
            if num_workers > len(self._free_gpus):
                raise InputError(
                    f"--jobs {num_workers}, but this machine has {len(self._free_gpus)} GPUs, of "
                    "which each run takes one: give at most that, or --device cpu"
                )

    def start(self, names: Sequence[str]) -> "list[LocalWorker]":
        """Start workers."""
        return [self._start(name) for name in names]

    def _start(self, name: str) -> "LocalWorker":
        gpu = None if self._free_gpus is None else self._free_gpus.pop(0)
        make_ready(self._out, name)
        process = start_process(
            self._out, name, self._num_threads, **({} if gpu is None else {GPUS: gpu})
        )
        return LocalWorker(name, process, log_file(self._out, name), self, gpu)

    def give_back(self, gpu: str) -> None:
        """Let another worker have a GPU."""
        assert self._free_gpus is not None
        self._free_gpus.append(gpu)

    def close(self) -> None:
        """Do nothing: processes that have ended hold nothing."""


class LocalWorker:
    """A process of this machine; see `Worker`."""

    def __init__(
        self,
        name: str,
        process: "subprocess.Popen[bytes]",
        log: Path,
        executor: LocalExecutor,
        gpu: str | None,
    ) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._executor = executor
        self._gpu = gpu
        self._end: WorkerEnd | None = None

    def poll(self) -> WorkerEnd | None:
        """Return how it ended; None while it works."""
        code = self._process.poll()
        if code is None or self._end is not None:
            return self._end
        pipe: IO[bytes] | None = self._process.stdin
        assert pipe is not None
        pipe.close()
        if self._gpu is not None:
            self._executor.give_back(self._gpu)
        self._end = end_of(code, self._log)
        return self._end

    def stop(self) -> None:
        """Ask it to finish its step, to save and to leave."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            self._process.kill()
            self._process.wait()
            self.poll()


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_cores(num_workers: int, num_threads: int) -> None:
    """Refuse more threads than this machine has cores.

    Raises:
        InputError: there are not so many.
    """
    cores = available_cores()
    if num_workers * num_threads > cores:
        raise InputError(
            f"--jobs {num_workers} with {num_threads} threads each needs "
            f"{num_workers * num_threads} cores and this machine has {cores}: give at most "
            f"--jobs {max(1, cores // num_threads)}, or fewer --threads"
        )


def _visible_gpus() -> list[str]:
    """Return what names each GPU that torch sees, as CUDA_VISIBLE_DEVICES takes it."""
    given = os.environ.get(GPUS)
    if given:
        return [part.strip() for part in given.split(",")][: torch.cuda.device_count()]
    return [str(index) for index in range(torch.cuda.device_count())]
