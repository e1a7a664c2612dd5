"""Costs of norms by engine and precision: right outputs first, rows by hand, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import powernorm
from commands import powernorm as run_command
from powernorm.lab.bench import __main__ as command
from powernorm.lab.bench.costs import cases, measuring
from powernorm.lab.bench.costs.cases import RIVALS, CostCase, Precision, Rival, cost_cases
from powernorm.lab.bench.costs.drawing import draw_costs
from powernorm.lab.bench.costs.encoders import OnnxFiles, build_rivals
from powernorm.lab.bench.costs.engines import Key, cost_runs, missing_engines
from powernorm.lab.bench.costs.rows import CostRow, best_rows, case_of, make_cost_rows
from powernorm.lab.bench.inference.cases import Size
from powernorm.lab.bench.inference.encoders import random_tokens
from powernorm.lab.bench.rows import read_any_rows, write_rows

SMALL = Size(16, 2, 32, "post", 1)
CASE = CostCase(SMALL, "torch", "float32", 1, 1, 6)
SECONDS: dict[Key, list[float]] = {
    ("LayerNorm", "fused"): [2.0] * 4,
    ("LayerNorm", "unfused"): [1.0] * 4,
    ("folded", "fused"): [0.9] * 4,
}


def made(case: CostCase = CASE) -> list[CostRow]:
    errors = dict.fromkeys(SECONDS, 0.0123456)
    return make_cost_rows(case, SECONDS, errors, {("folded", "fused"): 7})


def test_cases() -> None:
    whole, quick = cost_cases(), cost_cases(quick=True)
    assert len({case.label for case in whole}) == len(whole) == 2 * 13 * 2 + 2 * 11 * 2
    assert {case.size.features for case in whole if case.engine == "inductor"} == {384}
    assert {(case.size.features, case.threads) for case in quick} == {(384, 1)}
    assert "inductor" not in {case.engine for case in quick}
    assert set(quick) < set(whole)


def test_rows_compare_with_the_best_setting_of_layer_norm() -> None:
    rows = made()
    assert [(row.rival, row.setting, row.ratio) for row in rows] == [
        ("LayerNorm", "fused", 2.0),
        ("LayerNorm", "unfused", 1.0),
        ("folded", "fused", 0.9),
    ]
    assert [row.peak_bytes for row in rows] == [None, None, 7]
    assert {row.error for row in rows} == {0.0123}
    assert all(row.case == case_of(CASE) for row in rows)
    assert [(row.rival, row.setting) for row in best_rows(rows)] == [
        ("LayerNorm", "unfused"),
        ("folded", "fused"),
    ]


def test_rivals_have_equal_weights() -> None:
    models = build_rivals(SMALL)
    assert tuple(models) == RIVALS
    states = {rival: model.state_dict() for rival, model in models.items()}
    for rival in ("RMSNorm", "DyT"):
        for name, value in states[rival].items():
            assert name.endswith("alpha") or torch.equal(value, states["LayerNorm"][name])


PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8 dynamic")


def test_torch_runs_every_precision() -> None:
    models = build_rivals(SMALL)
    for precision in PRECISIONS:
        case = replace(CASE, precision=precision)
        rows = measuring.measure_cost_case(models, OnnxFiles(models, Path()), case, 0.0)
        assert [row.rival for row in rows] == list(RIVALS)
        assert all((row.error > 0) == (precision != "float32") for row in rows)
        assert all(row.peak_bytes and row.num_samples == 10 for row in rows)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        ("onnxruntime", "int8 static, all"),
        pytest.param("openvino", "bfloat16", marks=pytest.mark.slow),
        pytest.param("onnxruntime", "int8 dynamic", marks=pytest.mark.slow),
        pytest.param("inductor", "float32", marks=pytest.mark.slow),
    ],
)
def test_other_engines(tmp_path: Path, engine: Any, precision: Precision) -> None:
    pytest.importorskip("onnxruntime")
    if engine in missing_engines():
        pytest.skip(f"{engine} is not installed")
    models: dict[Rival, torch.nn.Module] = build_rivals(SMALL)
    if engine == "onnxruntime":
        models = {rival: models[rival] for rival in ("LayerNorm", "folded")}
    case = replace(CASE, engine=engine, precision=precision)
    rows = measuring.measure_cost_case(models, OnnxFiles(models, tmp_path), case, 0.0)
    settings = [row.setting for row in rows]
    assert settings == (["fused", "unfused", "fused"] if engine == "onnxruntime" else [""] * 4)
    assert all((row.peak_bytes is None) == (engine == "inductor") for row in rows)
    assert all((row.error > 1e-4) == (precision != "float32") for row in rows)


@pytest.mark.slow
def test_inductor_compiles_case_after_case(tmp_path: Path) -> None:
    models: dict[Rival, torch.nn.Module] = build_rivals(SMALL)
    models = {rival: models[rival] for rival in ("LayerNorm", "folded")}
    # torch stops at a limit of variants, 8: the third case of four rivals was over it.
    with torch._dynamo.config.patch(recompile_limit=2):
        for precision in ("float32", "bfloat16"):
            case = replace(CASE, engine="inductor", precision=precision)
            rows = measuring.measure_cost_case(models, OnnxFiles(models, tmp_path), case, 0.0)
            assert [row.rival for row in rows] == ["LayerNorm", "folded"]


def test_gate_stops_a_wrong_answer() -> None:
    models, tokens = build_rivals(SMALL), random_tokens(1, 6)
    steps = cost_runs(models, OnnxFiles(models, Path()), CASE, tokens)
    assert max(measuring.check_outputs(steps, models, CASE, tokens).values()) == 0.0
    right = steps["folded", ""]
    steps["folded", ""] = lambda: right() * (1 + 1e-3)
    with pytest.raises(powernorm.InputError, match=r"folded is wrong on 1 layers × 16, post-norm"):
        measuring.check_outputs(steps, models, CASE, tokens)


def test_preset_measures_resumes_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "SIZES", (SMALL,))
    monkeypatch.setattr(cases, "WAYS", (("torch", "float32"), ("torch", "bfloat16")))
    monkeypatch.setattr(cases, "THREADS", (1,))
    settings: dict[str, Any] = {
        "preset": "removal", "norms": None, "threads": None, "seconds": 0.0,
        "rounds": 2, "eager": False, "compiled": False, "show": None, "resume": True,
        "out": str(tmp_path / "rows.jsonl"), "plot": str(tmp_path / "rows.svg"),
    }  # fmt: skip
    (first, second) = cost_cases()
    write_rows(tmp_path / "rows.jsonl", {}, made(first))
    command.run(settings)
    measured = capsys.readouterr()
    assert "2 cases, of which 1 are measured already" in measured.err
    machine, rows = read_any_rows(tmp_path / "rows.jsonl")
    assert "preemptions_per_second" in machine
    assert rows[:3] == made(first)
    assert [row.case for row in rows if isinstance(row, CostRow)][3:] == [case_of(second)] * 4
    assert "each in its best setting" in measured.out
    assert (tmp_path / "rows.svg").read_text().startswith("<?xml")


def test_picture(tmp_path: Path) -> None:
    rows = [row for case in cost_cases(quick=True) for row in made(case)]
    draw_costs(tmp_path / "rows.png", {"processor": "one"}, rows)
    assert len((tmp_path / "rows.png").read_bytes()) > 5000


def test_bad_input(tmp_path: Path) -> None:
    wanted = {
        ("removal", "--threads", "1"): "drop --threads",
        ("removal", "--norms", "ln"): "compares LayerNorm, RMSNorm, DyT, folded: drop --norms",
        ("removal", "--resume"): "--resume goes on with --preset removal --out FILE",
        ("quick", "--resume", "--out", "x"): "--resume goes on with --preset removal --out FILE",
    }
    for given, words in wanted.items():
        assert words in run_command(tmp_path, "bench", "--preset", *given).refused()
