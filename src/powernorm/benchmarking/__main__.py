"""Runs a benchmark; started by `powernorm bench` in a process of its own (see `settings`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from powernorm.benchmarking.cases import GRIDS
from powernorm.benchmarking.gate import check_providers
from powernorm.benchmarking.measuring import measure
from powernorm.benchmarking.printing import print_case, print_targets
from powernorm.benchmarking.providers import NORMS, providers
from powernorm.benchmarking.rows import Row, describe_machine, write_rows
from powernorm.benchmarking.targets import outcomes


def run(settings: dict[str, Any]) -> None:
    """One benchmark.

    Args:
        settings: of `powernorm.cli.bench`: preset, norms, device, threads, seconds, eager,
            compiled, out, plot.
    """
    device = torch.device(settings["device"])
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    console, notes = Console(), Console(stderr=True)
    machine = describe_machine(device)
    for name, value in machine.items():
        notes.print(f"{name}: {value}", highlight=False)
    rows = _steps(settings, notes) if settings["preset"] == "step" else _grid(settings, console)
    if settings["preset"] == "step":
        print_case(console, rows)
    print_targets(console, outcomes(rows), rows)
    if settings["out"]:
        write_rows(Path(settings["out"]), machine, rows)
        console.print(f"rows: {settings['out']}", highlight=False)
    if settings["plot"]:
        from powernorm.benchmarking.drawing import draw_rows

        draw_rows(Path(settings["plot"]), machine, rows)
        console.print(f"plot: {settings['plot']}", highlight=False)


def _grid(settings: dict[str, Any], console: Console) -> list[Row]:
    device = torch.device(settings["device"])
    cases = GRIDS[settings["preset"]]
    competitors = providers(
        device,
        tuple(settings["norms"] or NORMS),
        with_eager=settings["eager"],
        with_compiled=settings["compiled"],
    )
    for dtype in dict.fromkeys(case.dtype for case in cases):
        check_providers(competitors, dtype, device)
    rows: list[Row] = []
    for case in cases:
        found = measure(case, competitors, device, seconds=settings["seconds"])
        print_case(console, found)
        rows += found
    return rows


def _steps(settings: dict[str, Any], notes: Console) -> list[Row]:
    from powernorm.benchmarking.steps import STEP_NORMS, measure_steps

    rounds = settings["rounds"]
    with notes.status("training steps") as status:
        return measure_steps(
            tuple(settings["norms"] or STEP_NORMS),
            rounds=rounds,
            on_round=lambda n: status.update(f"training steps: round {n} of {rounds}"),
        )


if __name__ == "__main__":
    try:
        run(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)  # noqa: T201
        sys.exit(130)
