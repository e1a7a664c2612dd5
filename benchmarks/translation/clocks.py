"""The clock of both workers."""

from __future__ import annotations

import resource
import time

Reading = tuple[float, float, int]
"""Wall clock, CPU time of the process, and how often others took a core from it."""


def read_clocks() -> Reading:
    preemptions = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    return time.perf_counter(), time.process_time(), preemptions


def elapsed(start: Reading, end: Reading) -> dict[str, float]:
    names = ("seconds", "cpu_seconds", "preemptions")
    return {name: b - a for name, a, b in zip(names, start, end, strict=True)}
