"""Time in turns, and the memory of a step in a pass of its own."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from torch.autograd.profiler import profile

ROUNDS = 5
"""At least so many, whatever time they take."""

Samples = Mapping[str, list[float]]
"""Seconds a call, by provider."""


class Memory(NamedTuple):
    """Bytes of torch's allocator that a step takes beyond what was there before it."""

    peak: int
    """Most at any time."""
    kept: int | None
    """There between forward and backward, the output included; None without a backward."""


Step = Callable[..., object]
"""One call of what is measured; it calls its argument between forward and backward."""


def nothing() -> None:
    """Do nothing between forward and backward, as while a step is timed."""


def interleave(
    steps: Mapping[str, Callable[[], object]], *, seconds: float, long: bool = False
) -> Samples:
    """Return the time of each step, all in turn in every round, in an order that changes.

    Args:
        steps: what is timed, by name.
        seconds: for all of them together, without warm-up; at least `ROUNDS` are run.
        long: a call takes so long that one is enough, for warm-up and in a turn.
    """
    warmup, untimed, timed = (1, 0, 1) if long else (3, 1, 2)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(warmup):
            step()
    order, shuffle = list(steps), random.Random(0)
    start, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - start < seconds:
        rounds += 1
        shuffle.shuffle(order)
        for name in order:
            # The first call of a turn meets the caches as another provider left them.
            samples[name] += [_clock(steps[name]) for _ in range(untimed + timed)][untimed:]
    return samples


def _clock(step: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure_memory(steps: Mapping[str, Step]) -> dict[str, Memory]:
    """Return the memory of one call of each step, exact and the same in every run.

    Every block that torch's allocator hands out to the calling thread is counted by the
    size that was asked for; memory that libraries take by themselves is not seen.

    Args:
        steps: by name. All have run before: what a first call makes for good, as the optimizer's
            state, is no memory of a step. Blocks from before that a step frees do not count.
    """
    # A cycle of an earlier pass that is collected within a step would be counted as freed by it.
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return {name: _measure_step(step) for name, step in steps.items()}
    finally:
        if was_enabled:
            gc.enable()


def _measure_step(step: Step) -> Memory:
    meter = _CpuMeter()
    kept: list[int] = []
    step(lambda: kept.append(meter.read_current()))
    return Memory(meter.read_peak(), kept[0] if kept else None)


class _CpuMeter:
    """Every change of what torch's CPU allocator has given out, as the profiler reports it."""

    def __init__(self) -> None:
        self._changes: list[int] = []
        self._start()

    def read_current(self) -> int:
        """Return the bytes that are allocated now, and continue."""
        # The profiler tells nothing before it has stopped.
        self._stop()
        self._start()
        return sum(self._changes)

    def read_peak(self) -> int:
        """Return the most bytes that were there, and stop."""
        self._stop()
        return max(accumulate(self._changes, initial=0))

    def _start(self) -> None:
        self._run = profile(profile_memory=True)
        self._run.__enter__()

    def _stop(self) -> None:
        self._run.__exit__(None, None, None)
        # torch's stubs do not know the bytes of an event.
        results: Any = self._run.kineto_results
        events = [event for event in results.events() if event.name() == "[memory]"]
        self._changes += [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
