"""Names that mean something to Markdown or LaTeX."""

import pytest

from powernorm.lab.report.text_tables import latex, markdown


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
    assert markdown(["n"], [False], [[name]]).splitlines()[-1] == f"| {expected} |"


@pytest.mark.parametrize("name", ["[2cm]", "*", " [x", "*[1ex] b"])
def test_latex_rows_are_no_arguments_of_the_row_before(name: str) -> None:
    lines = latex([name], [False], [["a"], [name]]).splitlines()
    assert lines[2].startswith("{}")
    assert lines[5].startswith("{}")
    assert lines[4] == r"a \\"
