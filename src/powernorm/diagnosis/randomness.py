"""The same random numbers in every pass over the data."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeated_random_numbers() -> Iterator[None]:
    """Afterwards the generators of torch (CPU), Python and NumPy are what they were before.

    A shuffling loader, or data that are augmented at random, so give the same batches each time.
    NumPy is looked at only where somebody has imported it. A generator that belongs to the data
    itself, as `DataLoader(generator=…)`, goes on.
    """
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
