"""Names with special characters of Markdown or LaTeX."""

import pytest

from powernorm_lab.report.tables import Table


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a$b$", r"a\$b\$"),
        ("~~a~~", r"\~\~a\~\~"),
        ("a&lt;b", r"a\&lt;b"),
        ("<b>*_`|[x]\\", r"\<b\>\*\_\`\|\[x\]\\"),
    ],
)
def test_markdown_shows_names_as_they_are(name: str, expected: str) -> None:
    assert Table(["n"], [False], [[name]]).markdown().splitlines()[-1] == f"| {expected} |"


@pytest.mark.parametrize("name", ["[2cm]", "*", " [x", "*[1ex] b"])
def test_latex_rows_are_no_arguments_of_the_row_before(name: str) -> None:
    lines = Table([name], [False], [["a"], [name]]).latex().splitlines()
    assert lines[2].startswith("{}")
    assert lines[5].startswith("{}")
    assert lines[4] == r"a \\"


def test_columns_of_one_name_both_stay() -> None:
    """Two metrics of a function may have the same shortened name."""
    table = Table(["n", "x", "x"], [False, True, True], [["a", "1", "2"]])
    assert "| a | 1 | 2 |" in table.markdown()
    assert r"a & 1 & 2 \\" in table.latex()
    assert table.html("l", "c").count("<td") == 2
    assert Table(["n", "x"], [False, True], []).latex().count("&") == 1
