"""The worked examples of docs/own-models.md run as their first lines say, and go on."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path

import pytest

from commands import powernorm

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ("the", "a", "film", "story", "it", "was", "with", "and", "of", "scene", "actor", "plot")
TELLING = {"good": ("great", "lovely", "moving"), "bad": ("dull", "awful", "tedious")}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, tmp_path)
    return tmp_path


def write_reviews(path: Path) -> None:
    """Short and long texts, of which a few words tell the class."""
    chance = random.Random(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(240):
            label = chance.choice(list(TELLING))
            words = chance.choices(WORDS, k=chance.randint(2, 24)) + chance.choices(
                TELLING[label], k=4
            )
            chance.shuffle(words)
            rows.writerow([" ".join(words), label])


def results(home: Path, *words: str) -> dict[str, dict[str, float]]:
    found = powernorm(home, "compare", *words, "--out", "runs")
    assert found.code == 0, found.err
    runs = json.loads((home / "runs" / "results.json").read_text())["runs"]
    assert {run["status"] for run in runs} == {"finished"}, runs
    return {run["norm"]: run["metrics"] for run in runs}


def test_a_gpt_in_a_plain_loop(home: Path) -> None:
    (home / "text.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 80)
    small = ("steps=30", "width=16", "length=16", "layers=1", "text=text.txt", "dropout=0.0")
    changes = [word for change in small for word in ("--set", change)]
    found = results(
        home, "compare_gpt:train", "--norms", "ln,rbn,pn", "--goal", "valid_loss:min", *changes
    )
    assert all(metrics["valid_loss"] < 2.6 for metrics in found.values())  # ln 17 = 2.8
    rows = (home / "runs" / "pn-seed0" / "norms.csv").read_text().splitlines()
    assert len(rows) > 3


def test_a_bert_from_csv_by_the_trainer(home: Path) -> None:
    pytest.importorskip("transformers")
    write_reviews(home / "reviews.csv")
    small = ("steps=40", "width=32", "layers=1", "learning_rate=5e-3")
    changes = [word for change in small for word in ("--set", change)]
    found = results(
        home, "compare_bert:train", "--norms", "ln,rbn", "--goal", "accuracy:max", *changes
    )
    assert found["ln"]["accuracy"] > 0.9
    assert found["rbn"]["valid_loss"] < 0.68  # ln 2 = 0.69
    header, *rows = (home / "runs" / "rbn-seed0" / "metrics.csv").read_text().splitlines()
    assert "accuracy" in header.split(",")
    assert [int(step) for step in dict.fromkeys(row.partition(",")[0] for row in rows)] == [
        *range(2, 41, 2)
    ]
