"""Encoders with folded norms: the same answers, rows that can be checked by hand, the picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.integrations.extras import install_extra
from powernorm.lab.bench import __main__ as command
from powernorm.lab.bench.inference import cases, engines, measuring
from powernorm.lab.bench.inference.cases import (
    INPUTS,
    SIZES,
    WAYS,
    InferenceCase,
    Size,
    cases_of,
)
from powernorm.lab.bench.inference.drawing import draw_inference
from powernorm.lab.bench.inference.encoders import (
    KINDS,
    Encoder,
    Kind,
    build_encoders,
    random_tokens,
)
from powernorm.lab.bench.inference.rows import InferenceRow, inference_outcomes, make_rows
from powernorm.lab.bench.rows import read_any_rows, read_rows, write_rows
from powernorm.lab.models.choices import Placement
from powernorm.norms import Norm
from powernorm.surgery.structure import FoldedNorm

SMALL = Size(16, 2, 32, "pre", 2)
CASE = InferenceCase(SMALL, 1, 6, "torch", "float32")
PLACEMENTS: tuple[Placement, ...] = ("pre", "post")


def encoders(placement: Placement) -> dict[Kind, nn.Module]:
    return build_encoders(replace(SMALL, placement=placement))


def answer(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens)


def samples(**seconds: float) -> Mapping[str, list[float]]:
    return {name: [value] * 4 for name, value in seconds.items()}


def test_cases_are_those_that_were_promised() -> None:
    assert {(s.layers, s.features, s.heads, s.hidden) for s in SIZES} == {
        (6, 512, 8, 2048),
        (6, 384, 12, 1536),
    }
    assert [s.placement for s in SIZES] == ["pre", "post"] * 2
    assert INPUTS == ((1, 16), (1, 128), (16, 64))
    assert WAYS == (("torch", "float32"), ("torch", "bfloat16"), ("onnxruntime", "float32"))
    assert len({case.label for size in SIZES for case in cases_of(size)}) == 36


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_encoders_differ_in_their_norms_alone(placement: Placement) -> None:
    found = encoders(placement)
    assert list(found) == list(KINDS)
    num_norms = 5 if placement == "pre" else 4
    kinds = {
        "folded": FoldedNorm,
        "LayerNorm": nn.LayerNorm,
        "RMSNorm": nn.RMSNorm,
        "BatchNorm": powernorm.BatchNorm,
    }
    for kind, model in found.items():
        assert not any(module.training for module in model.modules())
        norms = [m for m in model.modules() if isinstance(m, (Norm, *kinds.values()))]
        assert len(norms) == (0 if kind == "identity" else num_norms)
        assert all(isinstance(norm, kinds[kind]) for norm in norms)
    shapes = {
        kind: {name: value.shape for name, value in found[kind].named_parameters()}
        for kind in ("folded", "identity")
    }
    assert shapes["folded"] == shapes["identity"]
    for kind in ("LayerNorm", "RMSNorm"):
        for name, value in found[kind].named_parameters():
            assert torch.equal(value, found["BatchNorm"].get_parameter(name))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_folded_encoder_answers_as_the_unfolded_one(placement: Placement) -> None:
    found, tokens = encoders(placement), random_tokens(3, 9)
    wanted = answer(found["BatchNorm"], tokens)
    for kind in ("folded", "identity"):
        torch.testing.assert_close(answer(found[kind], tokens), wanted, rtol=0, atol=2e-5)
    for kind in ("LayerNorm", "RMSNorm"):
        assert not torch.allclose(answer(found[kind], tokens), wanted, atol=0.1)
    assert all(0.1 < float(answer(model, tokens).std()) < 10 for model in found.values())


def test_layer_norm_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All providers call torch's functions themselves."""
    called: list[str] = []
    layer_norm = torch.nn.functional.layer_norm

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        called.append("layer_norm")
        return layer_norm(*args, **kwargs)

    model = encoders("post")["LayerNorm"]
    monkeypatch.setattr(torch.nn.functional, "layer_norm", spy)
    answer(model, random_tokens(1, 4))
    assert len(called) == 4


@pytest.mark.parametrize("way", [way for way in WAYS if way[0] == "torch"])
def test_every_provider_gets_a_row(way: tuple[Any, str]) -> None:
    case = replace(CASE, engine=way[0], dtype=way[1])
    rows = measuring.measure_case(encoders("pre"), case, 0.0)
    assert [row.provider for row in rows] == list(KINDS)
    assert all(row.num_samples == 10 and row.median_us > 0 for row in rows)
    assert {row.provider: row.ratio for row in rows}["LayerNorm"] == 1.0
    assert {row.provider: row.ratio_to_identity for row in rows}["identity"] == 1.0


@pytest.mark.slow
def test_onnxruntime_runs_the_same_encoders() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    models = encoders("post")
    rows = measuring.measure_case(models, replace(CASE, engine="onnxruntime"), 0.0)
    assert [row.provider for row in rows] == list(KINDS)
    # What was changed for the export was a copy.
    assert any(isinstance(m, powernorm.BatchNorm) for m in models["BatchNorm"].modules())


def test_gate_stops_a_wrong_answer() -> None:
    models, tokens = encoders("pre"), random_tokens(1, 6)
    steps = engines.runs(models, CASE, tokens)
    measuring.check_runs(steps, models, CASE, tokens)
    right = steps["folded"]
    steps["folded"] = lambda: right() * (1 + 1e-4)
    with pytest.raises(powernorm.InputError, match=r"folded is wrong on 2 layers × 16, pre-norm"):
        measuring.check_runs(steps, models, CASE, tokens)


def test_an_encoder_that_keeps_a_norm_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Headless(Encoder):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + self.layers[0].feedforward_frame.norm(
                self.words(tokens).relu()
            )

    monkeypatch.setattr("powernorm.lab.bench.inference.encoders.Encoder", Headless)
    with pytest.raises(powernorm.InputError, match="nothing is timed"):
        build_encoders(SMALL)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "EXTRAS", {"export": ("onnx", "no_such_library")})
    with pytest.raises(
        powernorm.InputError, match="needs .*no_such_library.*" + re.escape(install_extra("export"))
    ):
        engines.check_extra()


def row_of(provider: str, seconds: float, case: InferenceCase = CASE) -> InferenceRow:
    made = make_rows(case, samples(**{"identity": 1e-3, "LayerNorm": 2e-3, provider: seconds}))
    return next(row for row in made if row.provider == provider)


def test_figures_of_a_row() -> None:
    row = row_of("folded", 1.5e-3)
    assert (row.median_us, row.num_samples) == (1500.0, 4)
    assert (row.ratio, row.ratio_to_identity) == (0.75, 1.5)
    assert (row.lower_us, row.upper_us) == (1500.0, 1500.0)
    assert (row.layers, row.features, row.heads, row.hidden) == (2, 16, 2, 32)
    assert (row.placement, row.batch, row.tokens) == ("pre", 1, 6)


def test_targets_are_judged_by_their_bounds() -> None:
    seconds = samples(folded=0.97, identity=1.0, LayerNorm=1.0, RMSNorm=1.2)
    for batch, promised in ((1, True), (16, False)):
        found = {
            outcome.target.rival: outcome
            for outcome in inference_outcomes(make_rows(replace(CASE, batch=batch), seconds))
        }
        # Faster than the floor by 3 % is a measurement that cannot be trusted.
        assert not found["identity"].met
        assert not found["LayerNorm"].met
        assert found["LayerNorm"].is_promised == promised
        assert found["RMSNorm"].met
        assert found["RMSNorm"].ratio == 0.808
    assert inference_outcomes([row_of("LayerNorm", 1.0)]) == []


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    rows = make_rows(CASE, samples(folded=1.0, identity=1.0, LayerNorm=1.0))
    write_rows(tmp_path / "rows.jsonl", {"threads": 1}, rows)
    assert read_any_rows(tmp_path / "rows.jsonl") == ({"threads": 1}, rows)
    with pytest.raises(powernorm.InputError, match="on norms, but on encoders"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["rows.svg", "rows.png"])
def test_picture(tmp_path: Path, name: str) -> None:
    rows = [
        row
        for size in (SMALL, replace(SMALL, placement="post"))
        for row in make_rows(
            replace(CASE, size=size),
            samples(folded=1.0, identity=1.0, LayerNorm=1.1, RMSNorm=9.0, BatchNorm=0.8),
        )
    ]
    machine = {"processor": "one", "threads": 2, "torch": "2"}
    draw_inference(tmp_path / name, machine, rows)
    content = (tmp_path / name).read_bytes()
    assert content.startswith((b"<?xml", b"\x89PNG"))
    assert len(content) > 5000


def test_preset_measures_writes_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SIZES", (SMALL,))
    monkeypatch.setattr(cases, "INPUTS", ((1, 6), (2, 4)))
    monkeypatch.setattr(cases, "WAYS", (("torch", "float32"),))
    settings: dict[str, Any] = {
        "preset": "inference", "norms": None, "threads": None, "seconds": 0.0,
        "rounds": 2, "eager": False, "compiled": False, "show": None,
        "out": str(tmp_path / "rows.jsonl"), "plot": str(tmp_path / "rows.svg"),
    }  # fmt: skip
    command.run(settings)
    measured = capsys.readouterr().out
    machine, rows = read_any_rows(tmp_path / "rows.jsonl")
    assert "preemptions_per_second" in machine
    assert [row.provider for row in rows] == [*KINDS, *KINDS]
    for expected in ("2 layers × 16 features, pre-norm, 2×4, torch float32", "of 2 met", "rows: "):
        assert expected in measured
    shown = {"show": settings["out"], "out": None, "plot": str(tmp_path / "again.png")}
    command.run(settings | shown)
    again = capsys.readouterr().out
    tables = measured.partition("rows: ")[0]
    assert again.startswith(tables)
    assert (tmp_path / "again.png").exists()
