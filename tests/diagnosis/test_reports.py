import csv
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import powernorm
from powernorm.diagnosis import Diagnosis
from powernorm.records import DIAGNOSED, DIAGNOSIS_COLUMNS, MONITORED, DiagnosisRecord
from refusals import refuses


@pytest.fixture(scope="module")
def report() -> Diagnosis:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    # A feature of nothing: ratios to it are infinite, for which JSON has no word.
    data = [torch.randn(4, 5, 8) * torch.tensor([0.0] * 5 + [1.0] * 3) for _ in range(3)]
    return powernorm.diagnose(nn.Sequential(nn.LayerNorm(8), layer), data, batch_sizes=(8,))


def test_rows_say_what_to_do(report: Diagnosis) -> None:
    for row in report.rows:
        assert row.kind == "layer"
        assert (row.action, row.into) in [("keep", ()), ("swap", (row.verdict,))]
        assert row.to_dict()["var_tid"] == row.var_tid


def test_json(report: Diagnosis, tmp_path: Path) -> None:
    path = tmp_path / "diagnosis.json"
    report.write_json(path)
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read.keys() == DiagnosisRecord.__required_keys__
    assert read["format"] == 1
    assert set(DIAGNOSIS_COLUMNS) <= read["layers"][0].keys()
    assert read["layers"][0]["kappa_80"] is None  # infinite
    assert {row["tokens"] for row in read["batch_sizes"]} == {8}


def test_csv(report: Diagnosis, tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    report.write_csv(path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == DIAGNOSIS_COLUMNS
    assert [row["layer"] for row in rows] == [layer.name for layer in report.rows]
    assert [row["verdict"] for row in rows] == [layer.verdict for layer in report.rows]
    assert float(rows[0]["var_tid"]) == report.rows[0].var_tid
    assert rows[0]["padded_var_tid"] == ""


def test_text(report: Diagnosis) -> None:
    lines = str(report).splitlines()
    assert lines[0].split() == [
        *("name", "action", "into", "mean_tid", "%", "var_tid", "%", "pn_tid", "%", "kappa_50"),
        "kind",
    ]
    assert f"{100 * report.rows[0].var_tid:.2f}" in lines[1]
    assert any(line.startswith("verdict: ") for line in lines)


@pytest.mark.parametrize("write", ["write_json", "write_csv"])
def test_a_path_that_cannot_be_written(report: Diagnosis, tmp_path: Path, write: str) -> None:
    refuses("cannot be written", getattr(report, write), tmp_path / "missing" / "file")


@pytest.mark.parametrize(("table", "names"), [("columns", DIAGNOSED), ("monitor", MONITORED)])
def test_the_page_explains_every_column(table: str, names: Iterable[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "diagnosis" / f"{table}.csv"
    explained = page.read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in explained] == []
