"""`benchmarks/bench.py`: rows, texts, pictures, resuming, and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import bench
from commands import SECONDS, environment
from powernorm import InputError
from speed import costs, encoders, inference
from speed.machine import describe_machine
from speed.norms import GRIDS, TARGETS, make_row, mask_costs, outcomes
from speed.providers import NORMS, Case
from speed.rows import Row, case_of, read_rows, write_rows
from speed.timing import Memory

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CASE = Case(4096, 512)


def row(norm: str, ratio: float, case: Case = CASE, backend: str = "cpu") -> Row:
    provider = {"ln": "torch LayerNorm", "bn1d": "torch BatchNorm1d"}.get(
        norm, f"{norm} ({backend})"
    )
    memory = (Memory(10_000_000, 4_000_000), Memory(8_000_000, None))
    label = (provider, norm, backend)
    return make_row(case, label, [ratio * 1e-3] * 4, [1e-3] * 4, [1e-4] * 4, memory)


def test_figures_of_a_row() -> None:
    seconds = [0.003, 0.001, 0.002, 0.004, 0.005]
    memory = (Memory(10_000_000, 4_000_000), Memory(8_000_000, 3_000_000))
    made = make_row(
        CASE, ("ours", "pn", "cpu"), seconds, [0.002, 0.004, 0.006], [0.001] * 3, memory
    )
    assert (made["median_us"], made["num_samples"]) == (3000.0, 5)
    assert made["lower_us"] < made["median_us"] < made["upper_us"]
    assert made["ratio"] == 0.75
    matrix = 4096 * 512 * 4
    assert made["gigabytes_per_second"] == pytest.approx(5 * matrix / 0.003 / 1e9, abs=0.01)
    assert made["share_of_copy"] == pytest.approx(5 / 2 / 3, abs=0.001)
    numbers = (made["peak_bytes"], made["kept_bytes"], made["peak_ratio"])
    assert numbers == (10_000_000, 4_000_000, 1.25)
    copied = make_row(
        CASE, ("copy", "copy", "torch"), [0.001] * 3, [0.002] * 3, [0.001] * 3, memory
    )
    assert copied["share_of_copy"] == 1.0
    assert CASE._replace(direction="forward", dtype="bfloat16").num_bytes == matrix


def test_rows_are_written_as_they_were_stored(tmp_path: Path) -> None:
    """A file of before comes back line by line, and new rows have its fields in its order."""
    for name, new in {
        "rivals": row("pn", 1.0),
        "inference": inference_row(),
        "removal": cost_row(),
    }.items():
        stored = RESULTS / f"{name}.jsonl"
        write_rows(tmp_path / "new" / "rows.jsonl", *read_rows(stored))
        assert (tmp_path / "new" / "rows.jsonl").read_text() == stored.read_text()
        assert list(new) == list(json.loads(stored.read_text().splitlines()[1]))
    assert list(describe_machine()) == list(read_rows(RESULTS / "rivals.jsonl")[0])[:-1]


def measured(kinds: Any) -> Any:
    case = bench.costs.Case(encoders.SIZES[0], "torch", "float32", 1, 1, 128)
    keys = [(kind, "") for kind in kinds]
    return inference.Measured(case, {key: [1.0] * 4 for key in keys}, dict.fromkeys(keys, 0.0), {})


def inference_row() -> Row:
    return inference.make_rows(measured(inference.KINDS))[0]


def cost_row() -> Row:
    return costs.make_rows(measured(costs.RIVALS))[0]


@pytest.mark.parametrize(
    "text", ["", "no json", '{"machine": {}}\n{"provider": "x"}', "[]", '{"machine": {}}\n[1]']
)
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"rows\.jsonl(, line 1: not JSON| holds no results)"):
        read_rows(path)
    with pytest.raises(InputError, match="holds no results"):
        read_rows(tmp_path / "absent.jsonl")


def test_targets_are_judged_by_their_own_rival() -> None:
    rows = [row("ln", 1.0), row("bn1d", 1.2), row("bn", 1.1), row("pn", 0.86)]
    found = {(one["norm"], target.rival): (target, ratio) for target, one, ratio in outcomes(rows)}
    assert len(found) == 3
    limits = {key: (target.limit, ratio) for key, (target, ratio) in found.items()}
    assert limits["bn", "torch LayerNorm"] == (1.3, 1.1)
    assert limits["bn", "torch BatchNorm1d"] == (0.85, pytest.approx(1.1 / 1.2, abs=1e-3))
    assert limits["pn", "torch LayerNorm"] == (0.85, 0.86)


def test_targets_keep_to_their_kind_of_case() -> None:
    cases = (CASE, Case(64, 512), CASE._replace(dtype="bfloat16"))
    rows = [row(norm, ratio, case) for case in cases for norm, ratio in (("ln", 1), ("pn", 0.9))]
    limits = {(one["tokens"], one["dtype"]): target.limit for target, one, _ in outcomes(rows)}
    assert limits == {(4096, "float32"): 0.85, (64, "float32"): 1.5, (4096, "bfloat16"): 1.0}
    assert outcomes([row("ln", 1.0), row("pn", 0.5, backend="eager")]) == []
    kinds = {(c.dtype, c.direction, c.tokens <= 256) for c in GRIDS["targets"]}
    assert {(t.dtype, t.direction, t.small) for t in TARGETS} <= kinds
    for grid in GRIDS.values():
        assert len({case.label for case in grid}) == len(grid)


def test_cost_of_a_mask() -> None:
    padded = CASE._replace(padding=0.25)
    rows = [row("ln", 1.0), row("pn", 0.8), row("pn", 0.88, padded), row("bn", 0.9, padded)]
    assert mask_costs(rows) == [("pn", 1.1)]


# ---- the script --------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, options)])
    bench.run(bench.parse())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cpu-2", "101 of 120 met"),
        ("rivals", "pn (compiled)"),
        ("step", "kept MB"),
        ("inference", "folded / identity, target 0.98 to 1.02: 30 of 36 met"),
        ("removal", "each in its best setting"),
    ],
)
def test_stored_rows_are_shown_and_drawn(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    picture = tmp_path / "new" / "rows.svg"
    run(monkeypatch, "--show", RESULTS / f"{name}.jsonl", "--plot", picture)
    said = capsys.readouterr()
    assert words in said.out
    assert "cpu_kernels: avx512" in said.err
    assert picture.read_text().startswith("<?xml")
    # There is no empty column.
    assert ("peak MB" in said.out) == (name != "inference")


def test_a_run_goes_on_where_another_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(costs, "SIZES", (encoders.Size(16, 2, 32, "post", 1),))
    monkeypatch.setattr(costs, "PRECISIONS", {"torch": ("float32", "bfloat16")})
    monkeypatch.setattr(costs, "THREADS", (1,))
    first, second = costs.cost_cases()
    known = [{"rival": "LayerNorm", "setting": "", **costs._fields(first), "ratio": 1.0}]
    known[0] |= {"median_us": 3.0, "lower_us": 2.0, "upper_us": 4.0}
    write_rows(tmp_path / "rows.jsonl", {}, known)
    options = ("removal", "--seconds", 0, "--resume", "--out", tmp_path / "rows.jsonl")
    run(monkeypatch, *options, "--plot", tmp_path / "rows.png")
    said = capsys.readouterr()
    assert "1 cases are measured already" in said.err
    machine, rows = read_rows(tmp_path / "rows.jsonl")
    assert "preemptions_per_second" in machine
    assert rows[:1] == known
    fields = costs.VIEW.case
    new = case_of(costs._fields(second), fields)
    assert [case_of(one, fields) for one in rows[1:]] == [new] * 4
    assert "each in its best setting" in said.out
    assert (tmp_path / "rows.png").stat().st_size > 5000


def script(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment(folder), **pipes)


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_is_over(tmp_path: Path) -> None:
    """And what is over is all providers of the first case, without the profiler's own messages."""
    process = script(tmp_path, "--threads", "1", "--seconds", "2", "--out", "rows.jsonl")
    path = tmp_path / "rows.jsonl"
    deadline = time.monotonic() + SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert "interrupted: rows.jsonl keeps the cases that are over" in err
    assert "Traceback" not in err
    assert "profiler" not in err
    assert max(map(len, out.splitlines())) <= 100
    machine, rows = read_rows(path)
    assert machine["threads"] == 1
    assert {one["tokens"] for one in rows} == {64}
    assert {f"{name} (cpu)" for name in NORMS} | {"copy"} <= {one["provider"] for one in rows}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("huge",), "invalid choice: 'huge'"),
        (("--show", "a.jsonl", "--out", "b.jsonl"), "--show measures nothing"),
        (("removal", "--threads", "1"), "drop --threads"),
        (("--resume",), "--resume needs the file of --out"),
    ],
)
def test_what_is_refused(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *options)
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_shown(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--show", "absent.jsonl"])
    monkeypatch.setattr(bench, "restart", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "error: absent.jsonl holds no results" in capsys.readouterr().err
