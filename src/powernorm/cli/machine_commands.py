"""The commands about this machine. Heavy imports happen inside the command."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def doctor() -> None:
    """Show which kernels this machine has, why not the rest, and whether they compute right."""
    from powernorm.cli.doctor import print_health

    raise typer.Exit(0 if print_health() else 1)


@app.command()
def bench(
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What to measure: quick, targets, rivals, grid, gpu, step (a training step), or "
            "inference (folded encoders).",
        ),
    ] = "quick",
    norms: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Only these norms; else all with kernels.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to run.")] = "cpu",
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
) -> None:
    """Measure the norms against torch's, as ratios to LayerNorm in the same run.

    Nothing is timed that does not agree with the float64 reference first.
    """
    from powernorm.cli.bench import start_benchmark

    start_benchmark(
        {
            "preset": preset,
            "norms": norms.split(",") if norms else None,
            "device": device,
            "threads": threads,
            "seconds": seconds,
            "rounds": rounds,
            "eager": with_eager,
            "compiled": with_compiled,
            "out": None if out is None else str(out),
            "plot": None if plot is None else str(plot),
            "show": None if show is None else str(show),
        }
    )
