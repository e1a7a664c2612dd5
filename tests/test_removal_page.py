"""The tables of docs/removal.md are those of the stored losses, and its text agrees with them."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from powernorm_lab.removal.settings import RemovalSettings

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the script, which is next to those that it imports."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module("removal_tables")
    for name in ("removal_tables", "cost_tables"):
        sys.modules.pop(name, None)


def test_the_tables_are_made_of_the_losses(tables: Any, tmp_path: Path) -> None:
    made = tables.tables()
    assert all(len(lines) > 2 for lines in made.values())
    tables.write(tmp_path, made)
    for file in tmp_path.iterdir():
        stored = (tables.FOLDER / file.name).read_text(encoding="utf-8")
        assert file.read_text(encoding="utf-8") == stored, "python tools/removal_tables.py"


def test_the_page_names_all_settings_with_their_defaults() -> None:
    text = (ROOT / "docs" / "removal" / "settings.csv").read_text(encoding="utf-8")
    cells = [line[:2] for line in csv.reader(text.splitlines())]
    for section, values in vars(RemovalSettings()).items():
        for name, value in getattr(values, "__dict__", {"": values}).items():
            if section == "schedule" and name != "name":  # the page of recipes has these
                continue
            default = "none" if value is None else str(value).replace("False", "false")
            key, also = (f"`{section}.{name}`", f"`.{name}`") if name else (f"`{section}`",) * 2
            found = [
                shown
                for names, shown in cells
                if key in names or (f"`{section}." in names and also in names)
            ]
            assert len(found) == 1, (section, name)
            assert default in found[0], (section, name, default)


def test_losses_are_over_the_control_of_the_same_seed(tables: Any, tmp_path: Path) -> None:
    def rows(arm: str, *losses: float) -> list[dict[str, Any]]:
        return [
            {"arm": arm, "seed": seed, "share": 0.1, "rate": 1e-3, "test_loss": loss}
            for seed, loss in enumerate(losses)
        ]

    found = {
        "originals": [3.0, 4.0],
        "pilot": [
            {"arm": arm, "seed": 0, "share": 0.03, "rate": rate, "valid_loss": loss}
            for arm, rate, loss in (("control", 1e-3, 3.0), ("a", 1e-3, 3.5), ("a", 2e-3, 3.25))
        ],
        "final": [
            *rows("freeze", 3.2, 4.3),
            *rows("match", 3.1, 4.2),
            *rows("control", 2.9, 3.9),
        ],
    }
    (tmp_path / "removal-methods-1m.json").write_text(json.dumps(found))
    made = tables.tables(tmp_path)
    assert made["final"] == [
        ("", "10%"),
        ("control, beside the original", "-0.100"),
        ("`freeze`", "+0.350"),
        ("`match`", "+0.250"),
        ("… beside `freeze`", "-0.100"),
    ]
    assert made["pilot"][1:] == [("control", "+0.000", ""), ("`a`", "+0.500", "+0.250")]
    assert made["later"] == made["larger"] == [("",)]
