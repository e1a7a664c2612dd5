"""benchmarks/fresh_seeds.py: numbers of runs, and those of the pages come from stored rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("powernorm_lab")
pd = pytest.importorskip("pandas")

import fresh_seeds  # noqa: E402  (needs pandas)

CLAIMS = [
    path.read_text(encoding="utf-8")
    for path in (Path(__file__).parents[2] / "docs" / "papers").glob("*/claims.csv")
]


def test_the_claims_have_the_numbers_of_the_stored_rows() -> None:
    found = fresh_seeds.table(pd.read_csv(fresh_seeds.ROWS))
    assert len(found) >= 6
    missing = [
        (line.claim, text)
        for line in found.itertuples()
        for text in [line._5]
        if not any(f"**{line.claim}** " in page and text in page for page in CLAIMS)
    ]
    assert missing == []


def test_numbers_of_a_run(tmp_path: Path) -> None:
    steps = range(1, 21)
    pd.DataFrame(
        {"step": steps, "train_loss": steps, "valid_loss": [None] * 18 + [3.5, None]}
    ).to_csv(tmp_path / "metrics.csv")
    gradients = [100.0] + [1.0] * 18 + [7.0]
    first = {"mean_distance": steps, "var_distance": 2.0}
    first |= {f"{part}_gradient_norm": gradients for part in ("mean", "var")}
    rows = pd.DataFrame({"layer": "a", **first})
    pd.concat([rows, rows.assign(layer="b", mean_distance=0)]).to_csv(tmp_path / "norms.csv")
    layers = [{"weight": [0.5, -3.0], "deviation": [1.0, 1.0]}, {"weight": [], "deviation": []}]
    (tmp_path / "scales.json").write_text(json.dumps({"layers": layers}))
    sizes = [
        {"layer": layer, "tokens": size, "mean_tid": tid, "var_tid": 0.5}
        for layer, size, tid in (("a", 1024, 0.1), ("b", 1024, 0.3), ("a", 64, 9.0))
    ]
    (tmp_path / "diagnosis.json").write_text(json.dumps({"batch_sizes": sizes}))
    assert fresh_seeds.numbers(tmp_path) == pytest.approx(
        {
            "train_loss": 19.5,
            "valid_loss": 3.5,
            "mean_distance": 19.5,
            "var_distance": 2.0,
            "mean_spike": 7.0,
            "var_spike": 7.0,
            "scales_inside": 0.5,
            "mean_tid_1024": 0.2,
            "var_tid_1024": 0.5,
        }
    )
