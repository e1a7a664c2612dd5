"""Context managers that restore process-wide state after a run or a comparison."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from powernorm_lab.engine.state import random_states, set_random_states


@contextmanager
def own_generators() -> Iterator[None]:
    """Restore the states of the random generators on exit."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@contextmanager
def own_modes() -> Iterator[None]:
    """Restore working directory, default dtype, threads and deterministic mode on exit."""
    folder, dtype, num_threads = Path.cwd(), torch.get_default_dtype(), torch.get_num_threads()
    determinism = _determinism()
    try:
        with torch.enable_grad():
            yield
    finally:
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)
        if _determinism() != determinism:  # setting it imports torch's compiler
            torch.use_deterministic_algorithms(determinism[0], warn_only=determinism[1])


@contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """Set the number of torch's CPU threads inside the block; None keeps it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
