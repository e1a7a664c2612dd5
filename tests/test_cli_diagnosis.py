"""`powernorm diagnose` as a user starts it."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import SMALL, powernorm
from powernorm.cli.diagnosis import Source, diagnose_and_print
from powernorm.errors import InputError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    home = tmp_path_factory.mktemp("runs")
    outcome = powernorm(
        home, "compare", "lm", "--preset", "smoke", "--norms", "ln,bn",
        "--data", text_file, *SMALL,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    return home / "runs" / "lm-smoke"


def test_a_run(runs: Path) -> None:
    run = runs / "bn-pre-seed0"
    more = ("--batches", "3", "--csv", "layers.csv")
    outcome = powernorm(runs, "diagnose", run, *more, fresh=True)
    assert outcome.code == 0, outcome.err
    assert "verdict: " in outcome.out
    assert "With running statistics the loss is" in outcome.out
    assert (run / "diagnosis.html").stat().st_size > 10_000
    record = json.loads((run / "diagnosis.json").read_text(encoding="utf-8"))
    assert record["model"] == "bn-pre-seed0"
    with (runs / "layers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == [layer["layer"] for layer in record["layers"]]
    # The page of the comparison shows it from the files alone.
    assert powernorm(runs, "report", str(runs)).code == 0
    page = (runs / "report.html").read_text(encoding="utf-8")
    assert record["verdict"]["reasons"][0].split(":")[0] in page


def test_a_checkpoint_leaves_the_runs_folder_alone(runs: Path) -> None:
    run = runs / "ln-pre-seed0"
    checkpoint = run / "checkpoints" / "last.ckpt"
    outcome = powernorm(runs, "diagnose", str(checkpoint), "--batches", "2", "--out", "page.html")
    assert outcome.code == 0, outcome.err
    assert (runs / "page.html").exists()
    assert not (run / "diagnosis.json").exists()
    assert not (run / "diagnosis.html").exists()


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"path": Path("missing")}, {}, "is no run of `powernorm compare`"),
    ({}, {"out": Path("missing/page.html")}, "is no folder"),
    ({}, {"csv": Path("checkpoints")}, "is a folder"),
    ({"sequences": 4}, {}, "leave out --sequences"),
    ({"data": "missing.txt"}, {}, "does not exist"),
    ({"num_batches": 1}, {}, "num_batches is 1"),
]


@pytest.mark.parametrize(("given", "targets", "words"), BAD)
def test_what_cannot_be_diagnosed(
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    targets: dict[str, Any],
    words: str,
) -> None:
    run = runs / "ln-pre-seed0"
    monkeypatch.chdir(run)
    source = replace(Source(run, None, 2, None, None), **given)
    with pytest.raises(InputError, match=words):
        diagnose_and_print(source, **{"out": None, "csv": None, **targets})


def test_errors_are_one_line(runs: Path) -> None:
    outcome = powernorm(runs, "diagnose", "missing")
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 1
