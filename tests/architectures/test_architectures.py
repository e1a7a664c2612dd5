"""Every architecture of the table: nothing gets worse, and nothing is wrong in silence.

`make test-models` runs all of them, stores their rows, and writes docs/models.md and docs/models/.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from architectures import huggingface_models, other_models, tables
from architectures.survey import survey

ARCHITECTURES = {
    one.name: one for one in (*huggingface_models.ARCHITECTURES, *other_models.ARCHITECTURES)
}
TYPICAL = ("bert", "llama")
"""Architectures in the default suite."""


@pytest.mark.models
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow)
        for name in sorted(ARCHITECTURES)
    ],
)
def test_an_architecture_is_no_worse_than_its_stored_row(
    name: str, record_property: Any, pytestconfig: pytest.Config
) -> None:
    row = survey(ARCHITECTURES[name])
    record_property("model", json.dumps(row))
    stored = tables.read().get(name)
    if stored is None and pytestconfig.getoption("rewrite_models", False):
        return
    assert stored is not None, f"no stored row of {name}: run `make test-models`"
    assert not tables.worse(row, stored)


def test_every_architecture_has_a_row_and_every_row_an_architecture() -> None:
    assert sorted(tables.read()) == sorted(ARCHITECTURES)


def test_the_pages_are_made_from_the_rows() -> None:
    rows = tables.read()
    pages = tables.pages(rows.values())
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text
    table = pages[tables.DOCS / "models" / "architectures.csv"]
    assert len(table.splitlines()) == 1 + len(rows)


def test_a_row_gets_worse_by_status_mask_and_counts() -> None:
    good = {"status": "ok", "mask": "ok", "swapped": 5, "folded": 5, "wrong": [], "refused": []}
    assert not tables.worse(good, good)
    assert not tables.worse(good, {**good, "status": "wrong", "folded": 3})
    for change in ({"status": "refused"}, {"mask": "silent"}, {"swapped": 4}, {"folded": 4}):
        assert tables.worse({**good, **change}, good)
