"""`powernorm norms`, `doctor` and `bench`: the layers, and how this machine computes them."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from powernorm.errors import InputError

ALLOCATOR: Final = {
    # glibc gives large blocks back at every free, and the page faults of the next allocation cost
    # more than a norm. The same for all providers.
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
_QUIET: Final = {
    # torch's profiler counts the memory on the CPU. It would say each time that it starts, and
    # where a block is freed that was there before it.
    "KINETO_LOG_LEVEL": "6",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def norms() -> None:
    """Show the table of norms."""
    from rich.console import Console
    from rich.table import Table

    from powernorm.norms import NORMS

    # No frame: its strokes would cost the columns that break lines at 80 characters. A fixed width,
    # for rich would rather break a class name in two than the sentences beside it.
    table = Table(box=None, pad_edge=False)
    widest = max(len(word) for info in NORMS.values() for word in info.title.split())
    table.add_column("name", overflow="fold", no_wrap=True)
    table.add_column("layer", overflow="fold", width=widest)
    for heading in ("averages over", "static", "paper"):
        table.add_column(heading, overflow="fold")
    for info in NORMS.values():
        static = "yes" if info.static else "no"
        table.add_row(info.name, info.title, info.averages_over, static, info.paper)
    console = Console()
    console.print(table)
    console.print("static: an affine map per feature in evaluation, which can be folded away.")


def doctor(
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Check all kernels against eager torch in float64: every norm, type and mask, "
            "about a minute.",
        ),
    ] = False,
) -> None:
    """Show which kernels this machine has, why not the rest, and whether they compute right."""
    from powernorm.cli.health import print_health, print_kernel_check

    if not (print_kernel_check() if kernels else print_health()):
        raise typer.Exit(1)


def bench(
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What to measure: quick, targets, rivals, grid, step (a training step), "
            "inference (folded encoders), or removal (what norms cost in each engine and "
            "precision; removal-quick: a part of it).",
        ),
    ] = "quick",
    norms: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Only these norms; else all with kernels.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads; else torch's default.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=0.1, metavar="S", help="Time for each case, all providers together."),
    ] = 5.0,
    rounds: Annotated[
        int, typer.Option(min=2, metavar="N", help="Steps of each norm, with --preset step.")
    ] = 8,
    with_eager: Annotated[
        bool, typer.Option("--eager/--no-eager", help="Measure the eager reference too.")
    ] = False,
    with_compiled: Annotated[
        bool, typer.Option("--compiled/--no-compiled", help="Measure torch.compile of it too.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rows there, one JSON a line.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw them there, as SVG or PNG.")
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure nothing: show (and draw) the rows of FILE."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="With --preset removal: measure what the file of --out has not yet."
        ),
    ] = False,
) -> None:
    """Measure the norms against torch's, as ratios to LayerNorm in the same run: time and memory.

    Nothing is timed that does not agree with the float64 reference first.
    """
    settings = {
        "preset": preset,
        "norms": norms.split(",") if norms else None,
        "threads": threads,
        "seconds": seconds,
        "rounds": rounds,
        "eager": with_eager,
        "compiled": with_compiled,
        "out": None if out is None else str(out),
        "plot": None if plot is None else str(plot),
        "show": None if show is None else str(show),
        "resume": resume,
    }
    _check_benchmark(settings)
    _start_benchmark(settings)


def _start_benchmark(settings: dict[str, Any]) -> NoReturn:
    """Replace this process by one with an allocator that does not stand in the way, and quiet logs.

    Args:
        settings: of `powernorm.lab.bench.__main__.run`.
    """
    sys.stdout.flush()
    command = [sys.executable, "-m", "powernorm.lab.bench", json.dumps(settings)]
    os.execve(sys.executable, command, _QUIET | os.environ | ALLOCATOR)


def _check_benchmark(settings: dict[str, Any]) -> None:
    """Raise before anything is run.

    Raises:
        InputError: an unknown preset or norm.
    """
    from powernorm.lab.bench.cases import GRIDS
    from powernorm.lab.bench.costs.cases import COST_PRESETS

    if settings["show"]:
        if settings["out"]:
            raise InputError("--show measures nothing, so there are no rows for --out: drop one")
        return
    preset = settings["preset"]
    presets = (*GRIDS, "step", "inference", *COST_PRESETS)
    if preset not in presets:
        raise InputError(f"preset is {preset!r}, expected one of {', '.join(presets)}")
    if settings["resume"] and (preset not in COST_PRESETS or not settings["out"]):
        raise InputError("--resume goes on with --preset removal --out FILE: give both")
    if preset in ("inference", *COST_PRESETS):
        _check_encoders(settings)
    else:
        _check_norms(settings)


def _check_norms(settings: dict[str, Any]) -> None:
    from powernorm.lab.bench.providers import NORMS as BENCHMARKED
    from powernorm.norms import NORMS

    preset, norms = settings["preset"], settings["norms"] or []
    known = NORMS if preset == "step" else BENCHMARKED
    for norm in norms:
        if norm not in known:
            raise InputError(f"norm {norm!r} has no benchmark; those that have: {', '.join(known)}")


def _check_encoders(settings: dict[str, Any]) -> None:
    from powernorm.integrations.extras import check_extra
    from powernorm.lab.bench.costs.cases import COST_PRESETS, RIVALS
    from powernorm.lab.bench.inference.encoders import KINDS

    preset = settings["preset"]
    compared = RIVALS if preset in COST_PRESETS else KINDS
    # The measured threads are those of the preset.
    own = ["threads"] if preset in COST_PRESETS else []
    given = [name for name in ("norms", "eager", "compiled", *own) if settings[name]]
    if given:
        raise InputError(
            f"the preset {preset!r} compares {', '.join(compared)}: drop --{given[0]}, which it "
            "does not take"
        )
    check_extra("export", f"the preset {preset!r}")
