"""The tables of docs/costs.md are those of the stored rows, and its text agrees with them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "tools" / "cost_tables.py"))


def cost(rival: str, setting: str, median: float, **more: Any) -> dict[str, Any]:
    case = {
        "features": 512, "placement": "post", "engine": "onnxruntime", "precision": "int8 dynamic",
        "threads": 1, "error": 0.01, "peak_bytes": 2_000_000,
    }  # fmt: skip
    return {**case, "rival": rival, "setting": setting, "median_us": median, **more}


ROWS = [
    cost("LayerNorm", "fused", 12.0),
    cost("LayerNorm", "unfused", 10.0),
    cost("RMSNorm", "fused", 9.0),
    cost("DyT", "fused", 11.0),
    cost("folded", "fused", 9.0),
]


def test_the_tables_are_made_of_the_rows(tmp_path: Path) -> None:
    SCRIPT["write"](tmp_path, SCRIPT["tables"]())
    made, stored = (
        {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
        for folder in (tmp_path, ROOT / "docs" / "costs")
    )
    assert len(made) == 8
    assert made == stored, "python tools/cost_tables.py"


def test_ratios_are_of_best_settings(tmp_path: Path) -> None:
    slower = [dict(row, threads=2, median_us=2 * row["median_us"]) for row in ROWS]
    slower[4]["median_us"] = 16.0
    lines = [{"machine": {}}, *ROWS, *slower]
    (tmp_path / "removal.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = SCRIPT["tables"](tmp_path)
    cells = made["latency"][-1]
    assert cells[:2] == ("post-norm", "onnxruntime int8 dynamic")
    assert cells[2:] == ("0.80-0.90", "0.89-1.00", "0.73-0.82", "0.90", "1.10", "1.20")
    assert ("post-norm, onnxruntime int8 dynamic", *["2.0"] * 4) in made["memory"]
    assert made["errors"][-1] == ("onnxruntime int8 dynamic", *["0.01 to 0.01"] * 4)
    SCRIPT["write"](tmp_path, made)
    assert sorted(file.stem for file in tmp_path.glob("*.csv")) == ["errors", "latency", "memory"]


def test_a_proof_is_compared_with_layer_norm(tmp_path: Path) -> None:
    row = {"placement": "pre", "nats": 2.0, "lookups": ["Exp"]}
    rows = [{**row, "rival": "LayerNorm", "rows": 1000}, {**row, "rival": "folded", "rows": 700}]
    (tmp_path / "proofs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = SCRIPT["tables"](tmp_path)["proofs"]
    assert made[-1] == ("pre-norm, **folded**", "2.000", "700", "0.700", "Exp")


def test_a_proven_circuit_has_its_times(tmp_path: Path) -> None:
    row = {
        "placement": "pre", "rival": "folded", "tokens": 14, "nats": 1.8, "fitted_rows": 250_000,
        "log_rows": 18, "setup_s": 61.4, "prove_s": 99.6, "verify_s": 0.25, "key_bytes": 1_234e6,
        "proof_bytes": 43_210, "error": 0.012,
    }  # fmt: skip
    (tmp_path / "proven.jsonl").write_text(json.dumps(row))
    cells = ("pre-norm, **folded**", 14, "1.800", "250,000", "2^18", "61", "100")
    cells += ("0.25", "1,234", "43", "1.20%")
    assert SCRIPT["tables"](tmp_path)["proven"][-1] == cells


def test_a_report_of_an_export_is_stored_once(tmp_path: Path) -> None:
    agreement = {"error": 0.021, "cosine": 0.9991, "same_largest": 0.987, "vectors": 4096}
    report = {
        "quantization": "all", "left": {}, "bytes": 22_000_000, "agreement": agreement,
    }  # fmt: skip
    (tmp_path / "x.json").write_text(json.dumps(report))
    for _ in range(2):
        SCRIPT["add"]("BERT", tmp_path / "x.json", tmp_path)
    assert SCRIPT["tables"](tmp_path)["trained"][1:] == [
        ("BERT", "static, all", 0, "22.0", "2.10%", "0.9991", "98.7%", "4,096")
    ]
