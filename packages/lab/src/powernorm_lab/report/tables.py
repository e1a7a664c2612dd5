"""Tables of texts, and their output as HTML, Markdown, LaTeX, CSV, and in a terminal."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar

from markupsafe import Markup
from pandas import DataFrame
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from powernorm_lab.report.document import escaped, part
from powernorm_lab.report.numerals import NOTHING, printable
from powernorm_lab.runs import REPORT_FILE

_LATEX: Final = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "–": "--",
        "±": r"$\pm$",
        "∞": r"$\infty$",
        "κ": r"$\kappa$",
        "λ": r"$\lambda$",
        "₁": "$_1$",
        "×": r"$\times$",
        "▲": r"$\blacktriangle$",
        "▼": r"$\blacktriangledown$",
        "\n": " ",
    }
)
_MINUS: Final = re.compile(r"(?<![\w-])-(?=\d)")
"""Sign of a negative number, which LaTeX's text would show as a hyphen."""
_SHORT: Final = 20
"""Longest text of a wide column that is not broken into lines."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        heading: heading of the column.
        text: function from a row to its cell.
        numeric: whether it is aligned to the right.
        meaning: tooltip of the heading, and entry of the glossary.
        key: identifier; empty for the heading.
        kind: function from a row to the CSS classes of its cell, such as `alarm`.
        title: function from a row to the tooltip of its cell.
        value: function from a row to the sort key, if its text does not begin with that number.
        wide: whether long texts are broken into lines.
    """

    heading: str
    text: Callable[[Row], str]
    numeric: bool = True
    meaning: str = ""
    key: str = ""
    kind: Callable[[Row], str] | None = None
    title: Callable[[Row], str] | None = None
    value: Callable[[Row], float | None] | None = None
    wide: bool = False

    @property
    def name(self) -> str:
        """Key, or else the heading."""
        return self.key or self.heading

    def attributes(self, row: Row, text: str) -> dict[str, object]:
        """Return the attributes of the page's cell with this text."""
        kinds = (
            "number" * self.numeric,
            self.kind(row) if self.kind else "",
            "wrap wide" * (self.wide and len(text) > _SHORT),
        )
        return {
            "text": text,
            "kind": " ".join(filter(None, kinds)),
            "title": self.title(row) if self.title else "",
            "value": self.value(row) if self.value else None,
        }


@dataclass(frozen=True)
class Table:
    """A table of texts, with its appearance on the page.

    Attributes:
        columns: columns; the first one names the rows.
        rows: arguments of the columns' functions.
        kinds: CSS class of each row, such as `best`; empty for none.
        foot: texts of a last row that is not sorted; empty for none.
        has_head: whether the page shows the headings, which sort the rows.
    """

    columns: Sequence[Column[Any]]
    rows: Sequence[Any]
    kinds: Sequence[str] = ()
    foot: Sequence[str] = ()
    has_head: bool = True

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]], texts: Iterable[str], wide: str = "") -> "Table":
        """Create a table from rows with cells by heading.

        Args:
            rows: rows with the headings of the first.
            texts: headings of columns that are aligned left; without rows, all headings.
            wide: heading of a column whose long texts are broken into lines.
        """
        lines, left = list(rows), list(texts)
        headings = list(lines[0]) if lines else left
        columns = [
            Column[Mapping[str, str]](
                heading, itemgetter(heading), heading not in left, wide=heading == wide
            )
            for heading in headings
        ]
        return cls(columns, lines)

    @classmethod
    def filled(cls, columns: Iterable[Column[Row]], rows: Sequence[Row], **options: Any) -> "Table":
        """Create a table without the columns that are empty in every row, except for the first."""
        first, *others = columns
        empty = ("", NOTHING)
        kept = [one for one in others if any(one.text(row) not in empty for row in rows)]
        return cls([first, *kept], rows, **options)

    @cached_property
    def headings(self) -> list[str]:
        """Headings of the columns, which may be repeated."""
        return [printable(column.heading) for column in self.columns]

    @cached_property
    def frame(self) -> DataFrame:
        """Texts of the rows and of the foot."""
        lines = [[printable(column.text(row)) for column in self.columns] for row in self.rows]
        lines += [list(self.foot)] if self.foot else []
        return DataFrame(lines, columns=self.headings, dtype=object)

    @property
    def lines(self) -> list[list[str]]:
        """Texts by row."""
        return list(map(list, self.frame.to_numpy()))

    def has(self, key: str) -> bool:
        """Return whether there is a column with this key, or this heading and no key."""
        return any(column.name == key for column in self.columns)

    def glossary(self) -> list[tuple[str, str]]:
        """Return the headings and meanings of the columns."""
        return [(column.heading, column.meaning) for column in self.columns]

    def html(self, label: str, caption: str) -> Markup:
        """Render the table for the page, in a box that scrolls instead of the page.

        Args:
            label: label of the box for screen readers.
            caption: caption of the table.
        """
        lines = self.lines[: len(self.rows)]
        body = [
            (
                kind,
                line[0],
                [
                    column.attributes(row, text)
                    for column, text in zip(self.columns[1:], line[1:], strict=True)
                ],
            )
            for row, line, kind in zip(
                self.rows, lines, self.kinds or [""] * len(lines), strict=True
            )
        ]
        columns = self.columns if self.has_head else ()
        foot = list(zip(self.columns, self.foot, strict=False))
        return part("table", label, caption, columns, body, foot)

    def markdown(self) -> str:
        r"""Render the table as GitHub's Markdown, with numbers aligned to the right.

        >>> print(Table.of([{"norm": "a|b", "TID": "1"}], ["norm"]).markdown(), end="")
        | norm | TID |
        | :--- | ---: |
        | a\|b | 1 |
        """
        rows: list[Iterable[str]] = [
            map(escaped, self.headings),
            ["---:" if column.numeric else ":---" for column in self.columns],
            *self.frame.map(escaped).itertuples(index=False, name=None),
        ]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def csv(self) -> str:
        """Render the texts as comma-separated values."""
        return str(self.frame.to_csv(index=False))

    def latex(self) -> str:
        r"""Render the table as a LaTeX tabular for `\usepackage{booktabs}`.

        >>> print(Table.of([{"norm": "a_b-2", "TID, %": "-1 ± 2"}], ["norm"]).latex(), end="")
        \begin{tabular}{lr}
        \toprule
        norm & TID, \% \\
        \midrule
        a\_b-2 & $-$1 $\pm$ 2 \\
        \bottomrule
        \end{tabular}
        """
        shown = self.frame.map(_latex)
        # LaTeX would take a bracket or an asterisk for an argument of the previous command.
        shown.columns = [_guarded(_latex(heading)) for heading in self.headings]
        shown.isetitem(0, shown.iloc[:, 0].map(_guarded))
        columns = "".join("r" if column.numeric else "l" for column in self.columns)
        text = shown.style.hide(axis="index").to_latex(column_format=columns, hrules=True)
        return str(text)


def _latex(text: str) -> str:
    return _MINUS.sub("$-$", text.translate(_LATEX))


def _guarded(text: str) -> str:
    return "{}" + text if text.lstrip().startswith(("[", "*")) else text


# In a terminal.


_LONGEST: Final = 30
"""Longest cell in characters that is never broken into lines."""
_GAP: Final = 2
"""Characters between columns."""
_WIDTH: Final = 80
"""Characters of a line in a file or a pipe, unless `COLUMNS` is set."""
_WIDEST: Final = 10_000


def of_width(console: Console, *, wide: bool) -> Console:
    """Return a console with the width of the terminal, of a file, or of any line."""
    if not wide and (console.is_terminal or "COLUMNS" in os.environ):
        return console
    return Console(
        file=console.file,
        width=_WIDEST if wide else _WIDTH,
        force_terminal=console.is_terminal,
        color_system="auto" if console.is_terminal else None,
    )


def print_table(
    console: Console, table: Table, important: Sequence[str] = (), *, wide: bool = False
) -> None:
    """Print the columns that fit, and name the others.

    Args:
        console: console to print to; lines in a file or a pipe have 80 characters, unless `COLUMNS`
            is set.
        table: table to print.
        important: keys or headings of columns, the most important first; other columns follow.
        wide: whether to print all columns, with each row in one line.
    """
    console = of_width(console, wide=wide)
    needed, wanted = _widths(table)
    left = console.width + _GAP
    keys = [column.name for column in table.columns]
    order = [keys.index(key) for key in important if key in keys]
    shown: list[int] = []
    for index in dict.fromkeys([*order, *range(len(keys))]):
        if not shown or needed[index] + _GAP <= left:
            shown.append(index)
            left -= needed[index] + _GAP
    shown.sort()
    rich = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index in shown:
        # Text instead of str, because rich would parse markup in names from files.
        more = max(0, min(left, wanted[index] - needed[index]))
        rich.add_column(
            Text(table.headings[index]),
            justify="right" if table.columns[index].numeric else "left",
            overflow="fold",
            width=needed[index] + more,
        )
        left -= more
    kinds = table.kinds or [""] * len(table.rows)
    for row, kind, line in zip(table.rows, kinds, table.lines, strict=False):
        cells = [
            Text(line[index], "red" * ("alarm" in _kind(table.columns[index], row)))
            for index in shown
        ]
        rich.add_row(
            *cells, style="bold" if "best" in kind else "dim" if "baseline" in kind else ""
        )
    console.print(rich, "")
    left_out = [heading for index, heading in enumerate(table.headings) if index not in shown]
    if left_out:
        text = f"not shown, see {REPORT_FILE}: {'; '.join(left_out)}"
        console.print(Text(text, style="dim"))


def _kind(column: Column[Any], row: Any) -> str:
    return column.kind(row) if column.kind else ""


def _widths(table: Table) -> tuple[list[int], list[int]]:
    """Return the smallest width of each column, with broken lines, and the width without them."""
    columns = list(zip(table.headings, *table.lines, strict=True))
    wanted = [max(map(cell_len, column)) for column in columns]
    needed = [
        max([min(_LONGEST, max(map(cell_len, cells), default=0)), *map(cell_len, heading.split())])
        for heading, *cells in columns
    ]
    return needed, wanted
