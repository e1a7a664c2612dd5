"""Study of padding: models, gaps, and page from the stored rows."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from study_modules import modules_of

import powernorm

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "padding"
FOLDER = ROOT / "docs" / "padding"


@pytest.fixture(scope="module")
def study() -> dict[str, ModuleType]:
    """Return the study's modules, under unique names."""
    return modules_of("padding", "conformer", "rules", "tables", "run")


def test_the_tables_are_of_the_stored_rows(study: dict[str, ModuleType], tmp_path: Path) -> None:
    rows = list(study["run"].Store(STUDY / "rows.jsonl").rows.values())
    study["tables"].write(tmp_path, rows)
    made, stored = (
        {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
        for folder in (tmp_path, FOLDER)
    )
    assert len(made) == 5
    assert made == stored
    page = FOLDER.with_suffix(".md").read_text(encoding="utf-8")
    assert f"\n{len(study['tables'].Study(rows).seeds)} seeds.\n" in page


def test_arms_that_are_masked_and_no_others_are_clean(study: dict[str, ModuleType]) -> None:
    _, held_out, _ = study["run"].split()
    features, lengths, _ = held_out.batch(torch.arange(4))
    batch = {"features": features, "lengths": lengths}
    for name, arm in study["conformer"].ARMS.items():
        report = powernorm.padding_check(study["conformer"].build(arm, 0, 20), batch)
        assert report.is_clean == arm.masked, f"{name}: {report}"


def test_arms_begin_alike(study: dict[str, ModuleType]) -> None:
    weights = [
        study["conformer"].build(arm, 3, 20).layers[1].conv.weight
        for arm in study["conformer"].ARMS.values()
    ]
    assert all(torch.equal(one, weights[0]) for one in weights)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1.0, 2.0, 3.0, 4.0], "+2.5, +0.4 to +4.6"),
        ([-1.0, -1.1, -0.9, -1.0], "-1.0, -1.1 to -0.9"),
        ([1.0, -1.0, 0.5, -0.5], "no difference"),
    ],
)
def test_a_gap_has_an_interval(
    study: dict[str, ModuleType], values: list[float], says: str
) -> None:
    assert study["tables"].gap(values, [0.0] * 4, 1) == says


def test_it_resumes_where_it_stopped(study: dict[str, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    of: list[Any] = ["mend", ["mask"], 0]
    store = study["run"].Store(path)
    assert store.lacks(of)
    store.add(of, {"loss": 1.0})
    again = study["run"].Store(path)
    assert not again.lacks(of)
    assert json.loads(path.read_text()) == {"of": of, "loss": 1.0}
