"""Tables of texts, and their output as HTML, Markdown, LaTeX and CSV."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from markupsafe import Markup
from pandas import DataFrame

from powernorm_lab.report.document import part
from powernorm_lab.report.numerals import printable

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
_MARKDOWN: Final = re.compile(
    r"[\\|*`<>\[\]$~&#]"
    r"|(?<![^\W_])_|_(?![^\W_])"  # not between letters and digits, where it is not markup
    r"|:(?=//)|(?<=www)\.",  # in addresses that GitHub would turn into links
    re.IGNORECASE,
)
_BACKTICKS: Final = re.compile("`+")
_SHORT: Final = 20
"""Longest text of a wide column that is not broken into lines."""

Place = tuple[int, int]
"""Row and column of a cell."""


@dataclass(frozen=True)
class Cell:
    """A cell of the page's table.

    Attributes:
        text: text of the cell.
        kind: CSS classes.
        title: tooltip.
        value: sort key; None for the number at the beginning of the text.
    """

    text: str
    kind: str = ""
    title: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of the page's table: first text, and other cells."""

    heading: str
    kind: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Table:
    """A table of texts, with its appearance on the page.

    Attributes:
        headings: headings of the columns; the first column names the rows.
        numeric: whether each column is aligned to the right.
        lines: texts of the rows.
        meanings: tooltips of the headings; empty for none.
        keys: identifiers of the columns.
        row_kinds: CSS class of each row, such as `best`.
        cell_kinds: CSS classes of some cells, such as `alarm`.
        titles: tooltips of cells.
        values: sort keys of cells whose texts do not begin with that number.
        wide: heading of a column whose long texts are broken into lines.
        num_foot: number of rows at the end that are not sorted.
        has_head: whether the page shows the headings, which sort the rows.
    """

    headings: Sequence[str]
    numeric: Sequence[bool]
    lines: Sequence[Sequence[str]]
    meanings: Sequence[str] = ()
    keys: Sequence[str] = ()
    row_kinds: Sequence[str] = ()
    cell_kinds: Mapping[Place, str] = field(default_factory=dict)
    titles: Mapping[Place, str] = field(default_factory=dict)
    values: Mapping[Place, float] = field(default_factory=dict)
    wide: str = ""
    num_foot: int = 0
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
        numeric = [name not in left for name in headings]
        return cls(headings, numeric, [list(line.values()) for line in lines], wide=wide)

    @cached_property
    def frame(self) -> DataFrame:
        """Return the texts; headings may be repeated."""
        return DataFrame(list(map(list, self.lines)), columns=list(self.headings), dtype=object)

    def html(self, label: str, caption: str) -> Markup:
        """Render the table for the page, in a box that scrolls instead of the page.

        Args:
            label: label of the box for screen readers.
            caption: caption of the table.
        """
        rows = [
            self._row(index, *texts)
            for index, texts in enumerate(self.frame.itertuples(index=False, name=None))
        ]
        end = len(rows) - self.num_foot
        meanings = self.meanings or [""] * len(self.headings)
        heads = zip(self.headings, self.numeric, meanings, strict=True) if self.has_head else ()
        return part(
            "table",
            label=label,
            caption=caption,
            headings=[(text, "number" if right else "", meaning) for text, right, meaning in heads],
            body=rows[:end],
            foot=rows[end:],
        )

    def _row(self, index: int, heading: str, *texts: str) -> Row:
        kind = self.row_kinds[index] if self.row_kinds else ""
        cells = [self._cell((index, column), text) for column, text in enumerate(texts, start=1)]
        return Row(heading, kind, cells)

    def _cell(self, place: Place, text: str) -> Cell:
        column = place[1]
        is_wide = self.headings[column] == self.wide and len(text) > _SHORT
        kinds = ("number" if self.numeric[column] else "", self.cell_kinds.get(place, ""))
        return Cell(
            text,
            " ".join(filter(None, (*kinds, "wrap wide" if is_wide else ""))),
            self.titles.get(place, ""),
            self.values.get(place),
        )

    def markdown(self) -> str:
        r"""Render the table as GitHub's Markdown, with numbers aligned to the right.

        >>> print(Table(["norm", "TID"], [False, True], [["a|b", "1"]]).markdown(), end="")
        | norm | TID |
        | :--- | ---: |
        | a\|b | 1 |
        """
        rows: list[Iterable[str]] = [
            map(escaped, self.headings),
            ["---:" if right else ":---" for right in self.numeric],
            *self.frame.map(escaped).itertuples(index=False, name=None),
        ]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def csv(self) -> str:
        """Render the texts as comma-separated values."""
        return str(self.frame.to_csv(index=False))

    def latex(self) -> str:
        r"""Render the table as a LaTeX tabular for `\usepackage{booktabs}`.

        >>> print(Table(["norm", "TID, %"], [False, True], [["a_b", "1 ± 2"]]).latex(), end="")
        \begin{tabular}{lr}
        \toprule
        norm & TID, \% \\
        \midrule
        a\_b & 1 $\pm$ 2 \\
        \bottomrule
        \end{tabular}
        """
        shown = self.frame.map(_latex)
        shown.columns = list(map(_latex, self.headings))
        # LaTeX would take a bracket or an asterisk for an argument of the previous command.
        shown = shown.rename(columns=_guarded)
        shown.isetitem(0, shown.iloc[:, 0].map(_guarded))
        columns = "".join("r" if right else "l" for right in self.numeric)
        text = shown.style.hide(axis="index").to_latex(column_format=columns, hrules=True)
        return str(text)


def copies(table: Table) -> Markup:
    """Return a table as Markdown and LaTeX, in blocks that are selected by one click."""
    return part("copies", [("Markdown", table.markdown()), ("LaTeX", table.latex())])


def escaped(text: str) -> str:
    r"""Escape a text for one line of Markdown: no markup, HTML, links or ends of cells.

    >>> escaped("a|b <i>[x](https://y)</i>\n# `c`")
    'a\\|b \\<i\\>\\[x\\](https\\://y)\\</i\\> \\# \\`c\\`'
    """
    return _MARKDOWN.sub(r"\\\g<0>", printable(" ".join(text.split())))


def code(text: str) -> str:
    """Format any text as code in a line of Markdown.

    >>> code("a <b>"), code("a `b`")
    ('`a <b>`', '`` a `b` ``')
    """
    line = printable(" ".join(text.split()))
    longest = max(map(len, _BACKTICKS.findall(line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"`{line}`"


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def _guarded(text: str) -> str:
    return "{}" + text if text.lstrip().startswith(("[", "*")) else text
