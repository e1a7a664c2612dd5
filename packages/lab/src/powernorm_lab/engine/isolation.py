"""What holds for the whole process, and is as it was before after a run or a comparison."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from powernorm_lab.engine.state import random_states, set_random_states


@contextmanager
def own_generators() -> Iterator[None]:
    """Let the runs seed the random generators; the caller's are as before afterwards."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@contextmanager
def own_modes() -> Iterator[None]:
    """Let a run change what holds for the whole process: the next one finds it as it was."""
    folder, dtype, num_threads = Path.cwd(), torch.get_default_dtype(), torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.enable_grad():
            yield
    finally:
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Let torch use so many CPU threads in the block; None leaves it its choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
