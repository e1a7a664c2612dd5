"""Options shared by several commands."""

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
"""Default preset."""


def task(more: str = "") -> Any:
    """Return the argument `TASK`.

    Args:
        more: end of its help.
    """
    return typer.Argument(
        help=f"What to train: {', '.join(TASKS)}; mine.toml, your own recipe; or "
        f"my.module:train, your own function{more}.",
    )


Placement = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Placement of the norms: {', '.join(PLACEMENTS)}; default: the recipe's.",
    ),
]

Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Size of the experiment, also of a study: smoke, demo, or another of `powernorm "
        f"recipes`; default: {PRESET}.",
    ),
]

Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A text file, a folder with ….train.txt, ….valid.txt and ….test.txt, or the name "
        "of a data set; for parse CoNLL-U files with such names; for translation a folder with "
        "train.de, train.en, valid.de …, sentence pairs in columns between tabs, or hf:NAME; "
        "`powernorm data` lists the sets and the files of other tasks; default: the recipe's.",
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
    return typer.Option("--force", help=f"Delete {what} in DIR first.")


def resume(what: str, more: str = "") -> Any:
    """Return the option `--resume`, which continues this."""
    return typer.Option("--resume", help=f"Continue {what} in DIR{more}.")


Figures = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Also write each figure of the page to files in DIR, in the width and fonts of a "
        "paper's column.",
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
        help="Accept JSON files that were edited by hand, and print their names.",
    ),
]

Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto (a GPU if there is one), cpu, cuda; for your own function also cuda:1, …",
    ),
]


def devices(more: str = "") -> Any:
    """Return the option `--devices`.

    Args:
        more: end of its help.
    """
    return typer.Option(
        min=1,
        metavar="N",
        help=f"Train every run in N processes, each on its own GPU or a part of the CPUs{more}.",
    )


Jobs = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Train N runs at a time, each in its own process and, if there are GPUs, on its own "
        "GPU; `powernorm work DIR` adds processes, also on other machines.",
    ),
]

Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        metavar="N",
        help="CPU threads of each run, part of its settings; default: the recipe's, 1 with --jobs, "
        "or torch's default.",
    ),
]

ExecutorName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Place of the processes of --jobs: local, on this machine; ray, tasks of a Ray "
        "cluster; slurm, jobs of SLURM. All machines need access to DIR.",
    ),
]

ExecutorOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-option",
        metavar="KEY=VALUE",
        help="For ray: address, num_cpus, num_gpus, …; for slurm: partition, timeout_min, … "
        "(docs/scaling.md); may be given several times.",
    ),
]

Retries = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="With --jobs: how often a run is retried after its process was lost.",
    ),
]


AsJson = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON instead of the table.")
]

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress; with --json only that.")
]

Silent = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def accept_edits(*folders: Path) -> None:
    """Accept edited JSON files in folders of comparisons or runs, and print their names."""
    from powernorm_lab.engine import folders as files

    for folder in folders:
        for path in files.accept_edits(folder):
            typer.echo(printable(f"accepted the edit of {path}"), err=True)


@contextmanager
def saving_figures(folder: Path | None, formats: str | None) -> Iterator[None]:
    """Write the figures that the block draws to files, and then print their names.

    Args:
        folder: folder of the files; None writes none.
        formats: comma-separated names of formats.

    Raises:
        InputError: formats without a folder, or as `saved_figures`.
    """
    if folder is None:
        if formats is not None:
            raise InputError(f"--format {formats} needs --figures: give --figures DIR, too")
        yield
        return
    from powernorm_lab.report import saved_figures

    names = [name.strip() for name in (formats or "svg").split(",")]
    with saved_figures(folder, names) as written:
        yield
    for file, what in written.items():
        typer.echo(f"{file}: {what}")
