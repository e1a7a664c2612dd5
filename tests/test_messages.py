"""Errors have one form: `problem: fix`, in lower case and without a period.

The command line prints them behind "error: ", and other messages are built around them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def messages() -> Iterator[tuple[str, str]]:
    """Yield place and text, with `{…}` for values, of each error with a message written out."""
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _makes_error(node.func) and node.args:
                text = _text(node.args[-1])
                if text:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _makes_error(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id.endswith("Error")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in node.values
        )
    return ""


def test_errors_are_written_in_one_style() -> None:
    found = list(messages())
    assert len(found) > 500

    ends = [place for place, text in found if re.search(r"[^.]\.$", text)]
    begins = [place for place, text in found if re.match("(The|There|A|An|No|This|Only) ", text)]

    assert not ends, "a message ends without a full stop"
    assert not begins, "a message begins with a small letter"
