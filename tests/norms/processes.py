"""Start gloo processes on this machine and run one function in each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_processes(
    function: Callable[..., Any], world_size: int, folder: Path, *args: Any
) -> list[Any]:
    """Call `function(rank, *args)` in every process and return what each gave, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_main, (function, world_size, port, folder, args), nprocs=world_size)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


def _main(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    port: int,
    folder: Path,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
