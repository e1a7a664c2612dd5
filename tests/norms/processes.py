"""Start gloo processes on this machine and run one function in each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from forking import own_packages


def run_processes(
    function: Callable[..., Any], world_size: int, folder: Path, *args: Any
) -> list[Any]:
    """Call `function(rank, *args)` in every process and return what each gave, by rank."""
    with own_packages():
        mp.start_processes(
            _main, (function, world_size, folder, args), world_size, start_method="forkserver"
        )
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


def _main(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # A file, not a port: a free port may be taken before it is used.
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
    # Python's end kills C++ threads that wait for its lock (gloo's may hold a tensor), and then
    # the process aborts now and then, after all is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
