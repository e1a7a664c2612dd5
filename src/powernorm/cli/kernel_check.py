"""`powernorm doctor --kernels`: every kernel against float64 formulas."""

import json
from typing import TYPE_CHECKING, Final

import typer

from powernorm.cli.launching import INTERRUPTED
from powernorm.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from powernorm.norms.kernel_check import KernelReport, Outcome

_SHOWN: Final = 5
"""Failed cases that are printed in full."""


def check_all_kernels(seed: int, case: int | None, *, as_json: bool) -> None:
    """Check, print and exit: 1 if something is wrong, 130 if interrupted.

    Args:
        seed: of the cases.
        case: index of the only one that is wanted.
        as_json: print JSON.
    """
    from rich.console import Console

    from powernorm.norms.kernel_check import check_kernels, start_report

    report, cases = start_report(seed, case)
    done = 0
    try:
        with progress_bar() as progress:
            task = progress.add_task("checking kernels", total=len(cases))

            def on_progress(number: int) -> None:
                nonlocal done
                done = number
                progress.update(task, completed=number)

            check_kernels(report, cases, on_progress)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {done} of {len(cases)} cases were checked", err=True)
    if as_json:
        typer.echo(json.dumps({**report.to_json(), "checked": done}, indent=2, allow_nan=False))
    else:
        _print(Console(), report, in_full=case is not None)
    if report.failures:
        raise typer.Exit(1)
    if done < len(cases):
        raise typer.Exit(INTERRUPTED)


def _print(console: "Console", report: "KernelReport", *, in_full: bool) -> None:
    from powernorm.norms.kernel_check import ALLOWED

    for machine in report.machines:
        counted = "" if machine.missing else f", {machine.cases} cases"
        console.print(f"{machine.backend}: {machine}{counted}", highlight=False, soft_wrap=True)
        _print_rows(console, report, machine.backend)
    shown = report.outcomes if in_full else report.failures[:_SHOWN]
    for outcome in shown:
        _print_case(console, outcome)
    console.print(
        "\nerror: the largest, in rounding errors: half a unit in the last place of the result, "
        "and what rounding\nthe intermediate results of the formula changes; "
        f"{ALLOWED} are allowed",
        highlight=False,
        soft_wrap=True,
    )
    failed = len(report.failures)
    checks = sum(machine.cases for machine in report.machines)
    verdict = f"{failed} of {checks} calls FAILED" if failed else f"all {checks} calls are right"
    console.print(f"seed {report.seed}: {verdict}", highlight=False, soft_wrap=True)


def _print_rows(console: "Console", report: "KernelReport", backend: str) -> None:
    from rich.table import Table

    rows = [row for row in report.rows.values() if row.backend == backend]
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("norm", "type"):
        table.add_column(heading, no_wrap=True)
    for heading in ("cases", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in sorted(rows, key=lambda row: (row.norm, row.dtype)):
        verdict = f"FAILED: {row.failures}" if row.failures else "ok"
        table.add_row(row.norm, row.dtype, str(row.cases), f"{row.error:.2g}", verdict)
    console.print(table)
    console.print()


def _print_case(console: "Console", outcome: "Outcome") -> None:
    verdict = "FAILED" if outcome.problems else "ok"
    facts = outcome.facts()
    lines = [f"\n{verdict} on {outcome.backend}:"]
    hidden = ("backend", "seed", "index", "errors", "problems")
    lines += [f"  {name}: {value}" for name, value in facts.items() if name not in hidden]
    if not outcome.problems:
        lines += [f"  error of {name}: {error:.2g}" for name, error in outcome.errors.items()]
    lines += [f"  WRONG: {name} {message}" for name, message in outcome.problems.items()]
    case = outcome.case
    lines.append(f"  again: powernorm doctor --kernels --seed {case.seed} --case {case.index}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
