"""Start gloo processes on this machine and run one function in each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

FOREIGN = str(Path(sys.prefix) / "foreign")


def run_processes(
    function: Callable[..., Any], world_size: int, folder: Path, *args: Any
) -> list[Any]:
    """Call `function(rank, *args)` in every process and return what each gave, by rank."""
    with _own_packages():
        mp.spawn(_main, (function, world_size, folder, args), nprocs=world_size)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


@contextmanager
def _own_packages() -> Iterator[None]:
    """Hide from new processes the folder of packages that other tests may have made visible.

    Its torchvision works with what these tests define for it alone.
    """
    before = list(sys.path)
    sys.path[:] = [path for path in before if path != FOREIGN]
    try:
        yield
    finally:
        sys.path[:] = before


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
