"""Measure norms against torch's, as ratios to LayerNorm in the same run: time and memory.

    python benchmarks/bench.py quick                  # two shapes, half a minute
    python benchmarks/bench.py targets --out rows.jsonl --plot rows.svg
    python benchmarks/bench.py --show rows.jsonl      # measure nothing

Presets: quick, targets, rivals (every backend) measure norms; step a training step; inference
folded encoders; removal what norms cost in each engine and precision. Nothing is timed that does
not agree with the reference first. An interrupted run keeps the cases that are over; `--resume`
measures what the file of `--out` has not yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from powernorm import InputError
from speed import costs, inference, norms, training_step
from speed.machine import count_preemptions, describe_machine, restart
from speed.rows import Known, Note, Row, by_case, case_of, read_rows, write_rows
from speed.showing import View, draw, print_case

BUSY: Final = 80
"""Preemptions a second that a quiet machine stays well below."""

Measure = Callable[[float, Known, Note], Iterator[list[Row]]]
"""Function that yields the rows of each unknown case, given the seconds for each.

It raises InputError if an output is wrong, and then times nothing.
"""


class Benchmark(NamedTuple):
    """A measurement, and its presentation."""

    measure: Measure
    view: View
    summarize: Callable[[Sequence[Row]], None]
    """Prints a summary of the rows."""
    draws: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    """Selects the rows for a picture."""


STEP: Final = Benchmark(training_step.measure_steps, training_step.VIEW, norms.print_targets)
INFERENCE: Final = Benchmark(inference.measure_inference, inference.VIEW, inference.print_targets)
COSTS: Final = Benchmark(costs.measure_costs, costs.VIEW, costs.print_best, costs.best_rows)
BENCHMARKS: Final = {
    **{
        preset: Benchmark(partial(norms.measure_norms, preset), norms.VIEW, norms.print_targets)
        for preset in norms.GRIDS
    },
    "step": STEP,
    "inference": INFERENCE,
    "removal": COSTS,
}


def benchmark_of(rows: Sequence[Row]) -> Benchmark:
    """Return the benchmark that measured the rows of a file."""
    if any(row.get("backend") == "step" for row in rows):
        return STEP
    kinds = [one for field, one in (("rival", COSTS), ("engine", INFERENCE)) if field in rows[0]]
    return (*kinds, BENCHMARKS["quick"])[0]


def note(text: str) -> None:
    """Print progress in plain lines, because a progress bar's thread would be measured too."""
    print(text, file=sys.stderr, flush=True)


def measure(given: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Return machine and rows of a run; print and store each case when it ends."""
    benchmark = BENCHMARKS[given.preset]
    rows = read_rows(given.out)[1] if given.resume and given.out.exists() else []
    known = {case_of(row, benchmark.view.case) for row in rows}
    machine = describe_machine()
    note("\n".join(f"{name}: {value}" for name, value in machine.items()))
    if given.resume:
        note(f"{len(known)} cases are measured already")
    begin, before = time.perf_counter(), count_preemptions()
    for found in benchmark.measure(given.seconds, known, note):
        print_case(benchmark.view, found)
        rows += found
        seconds = time.perf_counter() - begin
        machine["preemptions_per_second"] = round((count_preemptions() - before) / seconds, 1)
        # After every case, so that an interruption costs one case and not the run.
        if given.out:
            write_rows(given.out, machine, rows)
    if machine.get("preemptions_per_second", 0) > BUSY:
        note(
            f"other programs took this one's cores {machine['preemptions_per_second']:.0f} times a "
            "second: the figures are disturbed; repeat on a quiet machine"
        )
    return machine, rows


def run(given: argparse.Namespace) -> None:
    """Measure, or read stored rows; print and draw."""
    if given.show:
        machine, rows = read_rows(given.show)
        benchmark = benchmark_of(rows)
        note("\n".join(f"{name}: {value}" for name, value in machine.items()))
        for case in by_case(rows, benchmark.view.case):
            print_case(benchmark.view, case)
    else:
        if given.threads:
            torch.set_num_threads(given.threads)
        machine, rows = measure(given)
        benchmark = BENCHMARKS[given.preset]
    benchmark.summarize(rows)
    if given.out:
        print(f"rows: {given.out}")
    if given.plot and rows:
        draw(given.plot, benchmark.view, machine, benchmark.draws(rows))
        print(f"plot: {given.plot}")


def parse() -> argparse.Namespace:
    """Return the options; conflicting ones end the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", choices=BENCHMARKS, help="quick by default")
    parser.add_argument("--threads", type=int, help="torch's default; removal has its own")
    parser.add_argument("--seconds", type=float, default=5.0, help="a case, all providers together")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as SVG or PNG")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show its rows, measure nothing")
    parser.add_argument("--resume", action="store_true", help="resume the file of --out")
    given = parser.parse_args()
    if given.show and (given.preset or given.out or given.resume):
        parser.error("--show measures nothing: drop the preset, --out and --resume")
    if given.resume and not given.out:
        parser.error("--resume needs the file of --out: give it")
    if given.threads and given.preset == "removal":
        parser.error("the preset 'removal' measures one thread and two: drop --threads")
    given.preset = given.preset or "quick"
    return given


def main() -> None:
    """Run; bad input ends with 2, an interruption with 130."""
    given = parse()
    restart()
    try:
        run(given)
    except InputError as error:
        note(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        kept = f"{given.out} keeps the cases that are over" if given.out else "nothing is kept"
        note(f"interrupted: {kept}")
        sys.exit(130)


if __name__ == "__main__":
    main()
