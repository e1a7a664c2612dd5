"""Studies use public names only, like users' code."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

STUDIES = Path(__file__).parents[2] / "studies"
PUBLIC = ("powernorm", "powernorm.diagnosis", "powernorm_lab")


def imported(script: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import from powernorm."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("powernorm"):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.startswith("powernorm"))


def test_studies_import_public_names_only() -> None:
    scripts = sorted(STUDIES.rglob("*.py"))
    assert len(scripts) >= 6
    for script in scripts:
        for module, name in imported(script):
            assert module in PUBLIC, f"{script.name}: {module}"
            known = {*import_module(module).__all__, "lab", ""}
            assert name in known, f"{script.name}: {module}.{name}"
