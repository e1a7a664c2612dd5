"""Runs a benchmark; started by `powernorm bench` in a process of its own (see `settings`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from powernorm.errors import InputError
from powernorm.lab.bench.cases import GRIDS
from powernorm.lab.bench.costs.cases import COST_PRESETS, cost_cases
from powernorm.lab.bench.costs.engines import missing_engines
from powernorm.lab.bench.costs.measuring import measure_costs
from powernorm.lab.bench.costs.printing import print_best_costs, print_costs
from powernorm.lab.bench.costs.rows import CostRow
from powernorm.lab.bench.gate import check_providers
from powernorm.lab.bench.inference.cases import SIZES
from powernorm.lab.bench.inference.measuring import measure_size
from powernorm.lab.bench.inference.printing import print_encoders, print_inference_targets
from powernorm.lab.bench.inference.rows import InferenceRow
from powernorm.lab.bench.measuring import measure
from powernorm.lab.bench.printing import print_case, print_steps, print_targets
from powernorm.lab.bench.providers import NORMS, providers
from powernorm.lab.bench.rows import (
    AnyRow,
    Row,
    count_preemptions,
    describe_machine,
    read_any_rows,
    write_rows,
)
from powernorm.lab.bench.targets import outcomes

_BUSY = 80
"""Preemptions a second that a quiet machine stays well below."""

_WIDTH = 100
"""Columns that the tables need."""

Keep = Callable[[Sequence[AnyRow]], None]
Rows = list[Row] | list[InferenceRow] | list[CostRow]


def run(settings: dict[str, Any]) -> None:
    """One benchmark.

    Args:
        settings: of `powernorm bench`: preset, norms, threads, seconds, rounds, eager,
            compiled, out, plot, show, resume.
    """
    console, notes = Console(), Console(stderr=True)
    # In a pipe rich takes 80 columns and would cut the figures short.
    console.width = max(console.width, _WIDTH)
    rows: Rows
    if settings["show"]:
        machine, rows = read_any_rows(Path(settings["show"]))
        _introduce(notes, machine)
        _print_cases(console, rows)
    else:
        if settings["threads"]:
            torch.set_num_threads(settings["threads"])
        machine = describe_machine()
        _introduce(notes, machine)
        rows = _measure(settings, machine, console, notes)
    norms, encoders, costs = _parted(rows)
    print_targets(console, outcomes(norms), norms)
    print_inference_targets(console, encoders)
    print_best_costs(console, costs)
    if settings["out"] and not settings["show"]:
        console.print(f"rows: {settings['out']}", highlight=False)
    if settings["plot"]:
        _draw(Path(settings["plot"]), machine, rows)
        console.print(f"plot: {settings['plot']}", highlight=False)


def _parted(rows: Sequence[AnyRow]) -> tuple[list[Row], list[InferenceRow], list[CostRow]]:
    """Return rows of norms, of encoders and of costs; a run has only one kind."""
    norms = [row for row in rows if isinstance(row, Row)]
    encoders = [row for row in rows if isinstance(row, InferenceRow)]
    return norms, encoders, [row for row in rows if isinstance(row, CostRow)]


def _draw(path: Path, machine: dict[str, Any], rows: Sequence[AnyRow]) -> None:
    from powernorm.lab.bench.costs.drawing import draw_costs
    from powernorm.lab.bench.drawing import draw_rows
    from powernorm.lab.bench.inference.drawing import draw_inference

    norms, encoders, costs = _parted(rows)
    if costs:
        draw_costs(path, machine, costs)
    elif encoders:
        draw_inference(path, machine, encoders)
    else:
        draw_rows(path, machine, norms)


def _introduce(notes: Console, machine: dict[str, Any]) -> None:
    for name, value in machine.items():
        notes.print(f"{name}: {value}", highlight=False)


def _print_cases(console: Console, rows: Sequence[AnyRow]) -> None:
    norms, encoders, costs = _parted(rows)
    for _, cost_case in groupby(costs, key=lambda row: row.case):
        print_costs(console, list(cost_case))
    for _, encoder_case in groupby(encoders, key=lambda row: row.case):
        print_encoders(console, list(encoder_case))
    for _, case in groupby(norms, key=lambda row: row.case):
        found = list(case)
        if any(row.backend == "step" for row in found):
            print_steps(console, found)
        else:
            print_case(console, found)


def _measure(
    settings: dict[str, Any], machine: dict[str, Any], console: Console, notes: Console
) -> Rows:
    begin, before = time.perf_counter(), count_preemptions()

    def keep(rows: Sequence[AnyRow]) -> None:
        # After every case, so that an interruption costs one case and not the run.
        seconds = time.perf_counter() - begin
        machine["preemptions_per_second"] = round((count_preemptions() - before) / seconds, 1)
        if settings["out"]:
            write_rows(Path(settings["out"]), machine, rows)

    rows: Rows
    if settings["preset"] == "step":
        rows = _steps(settings, console, notes)
    elif settings["preset"] == "inference":
        rows = _encoders(settings, console, notes, keep)
    elif settings["preset"] in COST_PRESETS:
        rows = _costs(settings, console, notes, keep)
    else:
        rows = _grid(settings, console, notes, keep)
    keep(rows)
    if machine["preemptions_per_second"] > _BUSY:
        notes.print(
            f"[bold]other programs took this one's cores {machine['preemptions_per_second']:.0f} "
            "times a second: the figures are disturbed; repeat on a quiet machine[/bold]"
        )
    return rows


def _grid(settings: dict[str, Any], console: Console, notes: Console, keep: Keep) -> list[Row]:
    cases = GRIDS[settings["preset"]]
    competitors = providers(
        tuple(settings["norms"] or NORMS),
        with_eager=settings["eager"],
        with_compiled=settings["compiled"],
    )
    rows: list[Row] = []
    # Plain lines: a moving progress bar is a thread of its own that would be measured too.
    notes.print(f"comparing everyone with float64 on {len(cases)} cases", highlight=False)
    for case in cases:
        check_providers(competitors, case)
    for number, case in enumerate(cases, 1):
        notes.print(f"case {number} of {len(cases)}: {case.label}", highlight=False)
        found = measure(case, competitors, seconds=settings["seconds"])
        print_case(console, found)
        rows += found
        keep(rows)
    return rows


def _steps(settings: dict[str, Any], console: Console, notes: Console) -> list[Row]:
    from powernorm.lab.bench.steps import STEP_NORMS, measure_steps

    rounds = settings["rounds"]
    norms = tuple(settings["norms"] or STEP_NORMS)
    notes.print(f"{rounds} training steps of each of {', '.join(norms)}", highlight=False)
    rows = measure_steps(
        norms,
        rounds=rounds,
        on_round=lambda n: notes.print(f"round {n} of {rounds} is over", highlight=False),
    )
    print_steps(console, rows)
    return rows


def _encoders(
    settings: dict[str, Any], console: Console, notes: Console, keep: Keep
) -> list[InferenceRow]:
    rows: list[InferenceRow] = []

    def add(found: list[InferenceRow]) -> None:
        print_encoders(console, found)
        rows.extend(found)
        keep(rows)

    for number, size in enumerate(SIZES, 1):
        notes.print(f"encoder {number} of {len(SIZES)}: weights, folding", highlight=False)
        measure_size(
            size,
            seconds=settings["seconds"],
            on_case=lambda case: notes.print(case.label, highlight=False),
            on_rows=add,
        )
    return rows


def _costs(settings: dict[str, Any], console: Console, notes: Console, keep: Keep) -> list[CostRow]:
    rows = _known_costs(Path(settings["out"])) if settings.get("resume") else []
    missing = missing_engines()
    for engine in missing:
        notes.print(f"{engine} is not installed (pip install {engine}) and left out")
    cases = cost_cases(quick=settings["preset"] == COST_PRESETS[1])
    cases = [case for case in cases if case.engine not in missing]
    known = {row.case for row in rows}
    notes.print(f"{len(cases)} cases, of which {len(known)} are measured already", highlight=False)

    def add(found: list[CostRow]) -> None:
        print_costs(console, found)
        rows.extend(found)
        keep(rows)

    measure_costs(
        cases,
        seconds=settings["seconds"],
        known=known,
        on_case=lambda case: notes.print(case.label, highlight=False),
        on_rows=add,
    )
    return rows


def _known_costs(path: Path) -> list[CostRow]:
    """Return the rows of a run that was interrupted; none where there is no file."""
    if not path.exists():
        return []
    _, _, rows = _parted(read_any_rows(path)[1])
    return rows


def main() -> None:
    """Runs the settings given as JSON."""
    settings = json.loads(sys.argv[1])
    try:
        run(settings)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        out = settings["out"]
        kept = f"{out} keeps the cases that are over" if out else "without --out nothing is kept"
        print(f"interrupted: {kept}", file=sys.stderr)  # noqa: T201
        sys.exit(130)


if __name__ == "__main__":
    main()
