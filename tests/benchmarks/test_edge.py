"""The page of small devices has the stored rows, and its text agrees with them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from edge import table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stored() -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks/results/edge.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_page_is_of_the_stored_rows(stored: list[dict[str, Any]]) -> None:
    with (ROOT / "docs/edge/converters.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [list(map(str, line)) for line in table(stored)]
    failed = {(row["engine"], row["norm"]) for row in stored if "failed" in row}
    assert failed == {
        ("coreml", "ln"),
        *(("litert", norm) for norm in ("ln", "rms", "dyt", FOLDED)),
    }


FOLDED = "bn, folded"


@pytest.mark.parametrize("engine", ["executorch", "litert", "coreml"])
def test_a_folded_model_has_the_fewest_operators(engine: str, stored: list[dict[str, Any]]) -> None:
    sizes = {
        row["norm"]: sum(row["operators"].values())
        for row in stored
        if row["engine"] == engine and row["dtype"] == "float32"
    }
    assert sizes.keys() == {"ln", "rms", "dyt", FOLDED}
    assert sizes[FOLDED] == min(sizes.values()) < sizes["ln"]
