"""One page from any folders: comparisons, single runs, or several of them."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from powernorm.errors import InputError
from powernorm.lab.report.document import write_page
from powernorm.lab.report.loading import read_comparison, read_runs
from powernorm.lab.report.page import render_page, render_pages, tables_of
from powernorm.lab.report.records import Comparison
from powernorm.runs import COMPARISON_FILE, REPORT_FILE, RESULTS_FILE, is_run_folder


def write_reports(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Writes one page of everything that the folders hold.

    Runs that lie in the same folder make one table; each comparison has one of its own.

    Args:
        folders: comparisons and runs, complete or not.
        out: the HTML file; else `report.html`: of one folder inside it, of several in the folder
            that holds them all, or in the current one where that is a comparison of its own.

    Returns:
        The path of the page.

    Raises:
        InputError: a folder is no comparison and no run, a file in it is damaged or from a newer
            version, or there is no place for the page.
    """
    target = _target(folders, out)
    comparisons = read_selection(folders)
    if len(comparisons) == 1:
        return write_page(render_page(comparisons[0]), target)
    marked = [
        replace(comparison, anchor=f"part-{number}-")
        for number, comparison in enumerate(comparisons, start=1)
    ]
    return write_page(render_pages(marked), target)


def write_tables(folders: Sequence[Path], out: Path) -> list[Path]:
    """Writes the tables of everything that the folders hold, each as Markdown, LaTeX and CSV.

    Args:
        folders: comparisons and runs, complete or not.
        out: the folder of the files; it is made. Of several comparisons their names begin with the
            comparison's number.

    Returns:
        The paths of the files.

    Raises:
        InputError: a folder is no comparison and no run, or a file cannot be written.
    """
    comparisons = read_selection(folders)
    found = {
        f"{number}-{name}" if len(comparisons) > 1 else name: table
        for number, comparison in enumerate(comparisons, start=1)
        for name, table in tables_of(comparison).items()
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--tables {out}: no folder can be made there: give another") from error
    return [
        write_page(text, out / f"{name}.{ending}")
        for name, table in found.items()
        for ending, text in (
            ("md", table.markdown()),
            ("tex", table.latex()),
            ("csv", table.csv()),
        )
    ]


def read_selection(folders: Sequence[Path]) -> list[Comparison]:
    """What the folders hold: comparisons as they are, runs grouped by the folder they lie in.

    Raises:
        InputError: no folder is given, or one is no comparison and no run, or is damaged.
    """
    if not folders:
        raise InputError("no folder is given; expected comparisons or runs of `powernorm compare`")
    groups: dict[Path, list[str] | None] = {}
    for folder in folders:
        place = folder.resolve()
        if not is_run_folder(place) or _is_comparison(place):
            groups[folder if len(folders) == 1 else place] = None
            continue
        names = groups.setdefault(place.parent, [])
        # A run of a comparison that is shown as a whole is in it already.
        if names is not None and place.name not in names:
            names.append(place.name)
    return [
        read_comparison(folder) if names is None else read_runs(folder, names)
        for folder, names in groups.items()
    ]


def _is_comparison(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RESULTS_FILE, COMPARISON_FILE))


def _target(folders: Sequence[Path], out: Path | None) -> Path:
    if out is not None:
        if out.is_dir():
            raise InputError(f"{out} is a folder; give --out a file, {out / REPORT_FILE}")
        if not out.absolute().parent.is_dir():
            raise InputError(f"--out {out}: the folder {out.parent} does not exist; make it first")
        return out
    if len(folders) == 1:
        return folders[0] / REPORT_FILE
    shared = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    here = Path.cwd()
    for place in (shared, here):
        # The page of a comparison must not be lost to that of some of its runs.
        if place != Path(place.anchor) and not _is_comparison(place):
            return (place.relative_to(here) if place.is_relative_to(here) else place) / REPORT_FILE
    raise InputError(f"{here} is a comparison with a report of its own; name the file by --out")
