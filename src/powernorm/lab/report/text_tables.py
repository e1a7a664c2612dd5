"""Tables as text to copy: GitHub's Markdown and LaTeX with booktabs."""

import re
from collections.abc import Sequence
from typing import Final

from powernorm.lab.report.numerals import printable

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
        "\n": " ",
    }
)


_MARKDOWN: Final = re.compile(
    r"[\\|*`<>\[\]$~&#]"
    r"|(?<![^\W_])_|_(?![^\W_])"  # between letters and digits it is no markup
    r"|:(?=//)|(?<=www)\.",  # in what GitHub makes a link of as it stands
    re.IGNORECASE,
)
_BACKTICKS: Final = re.compile("`+")


def markdown(
    headings: Sequence[str], numeric: Sequence[bool], lines: Sequence[Sequence[str]]
) -> str:
    r"""A table in GitHub's Markdown, numbers to the right.

    >>> print(markdown(["norm", "TID"], [False, True], [["a|b", "1"]]), end="")
    | norm | TID |
    | :--- | ---: |
    | a\|b | 1 |
    """
    rows = [
        [escaped(text) for text in headings],
        ["---:" if right else ":---" for right in numeric],
        *([escaped(text) for text in line] for line in lines),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def escaped(text: str) -> str:
    r"""Text that Markdown shows as it is, in one line: no markup, HTML, link or end of a cell.

    >>> escaped("a|b <i>[x](https://y)</i>\n# `c`")
    'a\\|b \\<i\\>\\[x\\](https\\://y)\\</i\\> \\# \\`c\\`'
    """
    return _MARKDOWN.sub(r"\\\g<0>", printable(" ".join(text.split())))


def code(text: str) -> str:
    """Text as code in a line of Markdown, whatever it holds.

    >>> code("a <b>"), code("a `b`")
    ('`a <b>`', '`` a `b` ``')
    """
    line = printable(" ".join(text.split()))
    longest = max(map(len, _BACKTICKS.findall(line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"`{line}`"


def latex(headings: Sequence[str], numeric: Sequence[bool], lines: Sequence[Sequence[str]]) -> str:
    r"""A tabular for `\usepackage{booktabs}`.

    >>> print(latex(["norm", "TID, %"], [False, True], [["a_b", "1 ± 2"]]), end="")
    \begin{tabular}{lr}
    \toprule
    norm & TID, \% \\
    \midrule
    a\_b & 1 $\pm$ 2 \\
    \bottomrule
    \end{tabular}
    """
    columns = "".join("r" if right else "l" for right in numeric)
    rows = [_latex_line(line) for line in lines]
    parts = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_line(headings), r"\midrule"]
    return "\n".join([*parts, *rows, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_line(texts: Sequence[str]) -> str:
    line = " & ".join(text.translate(_LATEX) for text in texts)
    # A bracket or an asterisk would be taken for an argument of the command in front of the line.
    return ("{}" if line.lstrip().startswith(("[", "*")) else "") + line + r" \\"
