"""Rows, targets and pictures: figures that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from powernorm import InputError
from powernorm.lab.bench.cases import GRIDS, Case
from powernorm.lab.bench.drawing import draw_rows
from powernorm.lab.bench.rows import (
    Row,
    describe_machine,
    make_row,
    read_rows,
    write_rows,
)
from powernorm.lab.bench.targets import TARGETS, mask_costs, outcomes

CASE = Case(4096, 512)


def row(norm: str, ratio: float, case: Case = CASE, backend: str = "cpu") -> Row:
    provider = {"ln": "torch LayerNorm", "bn1d": "torch BatchNorm1d"}.get(
        norm, f"{norm} ({backend})"
    )
    seconds = [ratio * 1e-3] * 4
    return make_row(case, provider, norm, backend, seconds, [1e-3] * 4, [1e-4] * 4)


def test_figures_of_a_row() -> None:
    seconds = [0.003, 0.001, 0.002, 0.004, 0.005]
    made = make_row(CASE, "ours", "pn", "cpu", seconds, [0.002, 0.004, 0.006], [0.001] * 3)
    assert (made.median_us, made.num_samples) == (3000.0, 5)
    assert made.lower_us < made.median_us < made.upper_us
    assert made.ratio == 0.75
    matrix = 4096 * 512 * 4
    assert made.gigabytes_per_second == pytest.approx(5 * matrix / 0.003 / 1e9, abs=0.01)
    assert made.share_of_copy == pytest.approx(5 / 2 / 3, abs=0.001)
    copied = make_row(CASE, "copy", "copy", "torch", [0.001] * 3, [0.002] * 3, [0.001] * 3)
    assert copied.share_of_copy == 1.0


def test_unavoidable_traffic() -> None:
    for case, matrices in ((CASE, 5), (replace(CASE, direction="forward"), 2)):
        assert case.num_bytes == matrices * 4096 * 512 * 4
    assert replace(CASE, dtype="bfloat16").num_bytes == 5 * 4096 * 512 * 2


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    machine = describe_machine()
    rows = [row("ln", 1.0), row("pn", 0.7)]
    path = tmp_path / "new" / "rows.jsonl"
    write_rows(path, machine, rows)
    assert read_rows(path) == (machine, rows)
    assert {"processor", "threads", "torch", "cpu_kernels"} <= machine.keys()


@pytest.mark.parametrize("text", ["", "no json", '{"machine": {}}\n{"provider": "x"}', "[]"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"rows\.jsonl(, line 1: not JSON| holds no results)"):
        read_rows(path)
    with pytest.raises(InputError, match="holds no results"):
        read_rows(tmp_path / "absent.jsonl")


def test_targets_are_judged_by_their_own_rival() -> None:
    rows = [row("ln", 1.0), row("bn1d", 1.2), row("bn", 1.1), row("pn", 0.86)]
    found = {(o.row.norm, o.target.rival): o for o in outcomes(rows)}
    assert found["bn", "torch LayerNorm"].met
    versus = found["bn", "torch BatchNorm1d"]
    assert versus.ratio == pytest.approx(1.1 / 1.2, abs=1e-3)
    assert not versus.met
    assert not found["pn", "torch LayerNorm"].met
    assert len(found) == 3


def test_targets_keep_to_their_kind_of_case() -> None:
    small, narrow = Case(64, 512), replace(CASE, dtype="bfloat16")
    rows = [row("ln", 1.0, case) for case in (CASE, small, narrow)]
    rows += [row("pn", 0.9, case) for case in (CASE, small, narrow)]
    limits = {(o.row.tokens, o.row.dtype): o.target.limit for o in outcomes(rows)}
    assert limits == {(4096, "float32"): 0.85, (64, "float32"): 1.5, (4096, "bfloat16"): 1.0}
    assert outcomes([row("ln", 1.0), row("pn", 0.5, backend="eager")]) == []


def test_every_target_has_a_case() -> None:
    kinds = {(c.dtype, c.direction, c.tokens <= 256) for c in GRIDS["targets"]}
    assert {(t.dtype, t.direction, t.small) for t in TARGETS} <= kinds


def test_cost_of_a_mask() -> None:
    padded = replace(CASE, padding=0.25)
    rows = [row("ln", 1.0), row("pn", 0.8), row("ln", 1.0, padded), row("pn", 0.88, padded)]
    assert [(r.norm, cost) for r, cost in mask_costs(rows)] == [("ln", 1.0), ("pn", 1.1)]


@pytest.mark.parametrize("name", ["rows.svg", "rows.png"])
def test_picture(tmp_path: Path, name: str) -> None:
    machine = describe_machine()
    padded = replace(CASE, padding=0.25)
    rows = [row("ln", 1.0), row("pn", 0.8), row("slow", 9.0), row("pn", 0.88, padded)]
    draw_rows(tmp_path / name, machine, rows)
    content = (tmp_path / name).read_bytes()
    assert content.startswith((b"<?xml", b"\x89PNG"))
    assert len(content) > 5000
