"""Options that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from powernorm.cli.options import TrustCode as TrustCode
from powernorm.cli.options import Wide as Wide
from powernorm.errors import InputError, printable
from powernorm_lab.runs import PLACEMENTS, TASKS

PRESET: Final = "demo"
"""Where no preset is named."""


def task(more: str = "") -> Any:
    """Return the argument that names what is trained.

    Args:
        more: the end of its help.
    """
    return typer.Argument(
        help=f"What to train: {', '.join(TASKS)}; mine.toml, a recipe of your own; or "
        f"my.module:train, a function of your own{more}.",
    )


Placement = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Where the norms stand: {', '.join(PLACEMENTS)}; else the recipe's.",
    ),
]

Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Size of the experiment, also of a study: smoke, demo, or another of `powernorm "
        f"recipes`; else {PRESET}.",
    ),
]

Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A text file, a folder with ….train.txt, ….valid.txt and ….test.txt, or the name "
        "of a data set; for parse CoNLL-U files with such names; for translation a folder with "
        "train.de, train.en, valid.de …, sentence pairs in columns between tabs, or hf:NAME; "
        "`powernorm data` lists the sets and what the other tasks take; else the recipe's.",
    ),
]

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting; may be given several times."
    ),
]


def force(what: str) -> Any:
    """Return the option `--force`, which deletes this first."""
    return typer.Option("--force", help=f"Delete {what} that DIR holds first.")


def resume(what: str, more: str = "") -> Any:
    """Return the option `--resume`, which goes on with this."""
    return typer.Option("--resume", help=f"Go on with {what} that DIR holds{more}.")


Figures = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write each figure of the page as files here, too: one column of a paper wide, with "
        "its fonts.",
    ),
]

FigureFormats = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT,…",
        help="Formats of the figures' files: svg, pdf, png.  [default: svg]",
    ),
]

AcceptEdits = Annotated[
    bool,
    typer.Option(
        "--accept-edits",
        help="Take JSON files that were edited by hand as they are, and name them.",
    ),
]

Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto (a GPU where there is one), cpu, cuda; of a function of your own also cuda:1, …",
    ),
]


def devices(more: str = "") -> Any:
    """Return the option `--devices`.

    Args:
        more: the end of its help.
    """
    return typer.Option(
        min=1,
        metavar="N",
        help="Train every run in N processes, each on a GPU of its own or a part of the CPUs"
        f"{more}.",
    )


Jobs = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Train N runs at a time, each in a process of its own, on a GPU of its own where "
        "there are GPUs; more processes, also of other machines: `powernorm work DIR`.",
    ),
]

Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        metavar="N",
        help="CPU threads of each run, part of its settings; else the recipe's, 1 with --jobs, "
        "or torch's choice.",
    ),
]

ExecutorName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Where the processes of --jobs are: local, on this machine; ray, tasks of a Ray "
        "cluster; slurm, jobs of SLURM. All machines have to see DIR.",
    ),
]

ExecutorOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-option",
        metavar="KEY=VALUE",
        help="Of ray: address, num_cpus, num_gpus, …; of slurm: partition, timeout_min, … "
        "(docs/scaling.md); may be given several times.",
    ),
]

Retries = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="With --jobs: so often a run is tried again whose process was lost.",
    ),
]


AsJson = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON in place of the table.")
]

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress; with --json only that.")
]

Silent = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def accept_edits(*folders: Path) -> None:
    """Do what `AcceptEdits` says in folders of comparisons or runs."""
    from powernorm_lab.engine import folders as files

    for folder in folders:
        for path in files.accept_edits(folder):
            typer.echo(printable(f"accepted the edit of {path}"), err=True)


@contextmanager
def saving_figures(folder: Path | None, formats: str | None) -> Iterator[None]:
    """Write the figures that are drawn in the block as files, and print their names after it.

    Args:
        folder: where to; None writes none.
        formats: names with commas between them.

    Raises:
        InputError: formats without a folder, or as `saved_figures`.
    """
    if folder is None:
        if formats is not None:
            raise InputError(f"--format {formats} is of figures in files: give --figures DIR, too")
        yield
        return
    from powernorm_lab.report import saved_figures

    names = [name.strip() for name in (formats or "svg").split(",")]
    with saved_figures(folder, names) as written:
        yield
    for file, what in written.items():
        typer.echo(f"{file}: {what}")
