"""`powernorm bench` and `powernorm doctor` as subprocesses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import SECONDS, Outcome, arguments, environment, powernorm
from powernorm.lab.bench.rows import read_rows

QUICK = ("bench", "--norms", "pn,rms", "--seconds", "0.1", "--threads", "1")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder with rows, and what was printed of them."""
    folder = tmp_path_factory.mktemp("bench")
    files = ("--out", "new/rows.jsonl", "--plot", "new/rows.svg")
    return folder, powernorm(folder, *QUICK, *files, fresh=True)


def test_bench_prints_writes_and_draws(measured: tuple[Path, Outcome]) -> None:
    folder, outcome = measured
    assert outcome.code == 0, outcome.err
    for expected in ("torch LayerNorm", "pn (cpu)", "rms (cpu)", "targets", " met"):
        assert expected in outcome.out
    assert "cpu_kernels: " in outcome.err
    machine, rows = read_rows(folder / "new" / "rows.jsonl")
    assert machine["threads"] == 1
    assert {(row.tokens, row.provider) for row in rows} >= {(64, "pn (cpu)"), (4096, "copy")}
    assert "rows: new/rows.jsonl" in outcome.out
    assert (folder / "new" / "rows.svg").read_text().startswith("<?xml")


def test_bench_shows_memory_beside_speed(measured: tuple[Path, Outcome]) -> None:
    """In full, though a pipe has no width; and without the profiler's own messages."""
    folder, outcome = measured
    assert outcome.out.count("peak MB   / LN  kept MB") == 2
    assert "…" not in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100
    assert "profiler" not in outcome.err
    _, rows = read_rows(folder / "new" / "rows.jsonl")
    for provider in ("torch LayerNorm", "torch BatchNorm1d", "pn (cpu)", "rms (cpu)"):
        found = [row for row in rows if row.provider == provider]
        assert [row.tokens for row in found] == [64, 4096]
        assert all(row.peak_bytes and row.kept_bytes and row.peak_ratio for row in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--preset", "huge"),
            "preset is 'huge', expected one of quick, targets, rivals, grid, step, inference",
        ),
        (("--norms", "pn,softmax"), "norm 'softmax' has no benchmark; those that have: pn-only"),
        (("--preset", "step", "--norms", "layer"), "norm 'layer' has no benchmark"),
        (
            ("--preset", "inference", "--norms", "pn"),
            "'inference' compares folded, identity, LayerNorm, RMSNorm, BatchNorm: drop --norms",
        ),
        (("--preset", "inference", "--compiled"), "drop --compiled"),
    ],
)
def test_bench_refuses(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in powernorm(tmp_path, "bench", *options).refused()


def test_an_interrupted_bench_keeps_what_is_over(tmp_path: Path) -> None:
    command = arguments("bench", "--norms", "rms", "--seconds", "3", "--out", "rows.jsonl")
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = tmp_path / "rows.jsonl"
    deadline = time.monotonic() + SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "interrupted: rows.jsonl keeps the cases that are over" in err
    assert "Traceback" not in err
    assert {row.tokens for row in read_rows(path)[1]} == {64}


def test_doctor(tmp_path: Path) -> None:
    outcome = powernorm(tmp_path, "doctor", fresh=True)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert any(line.startswith("cpu: C++ kernels, ") for line in lines)
    assert sum(": right (largest error" in line for line in lines) >= 6
    assert "on the CPU your models use: cpu" in lines
    assert (
        "every layer runs forward and backward, alone and under activation checkpointing" in lines
    )


def test_doctor_reports_a_layer_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where torch has changed: the kernels are right, and no layer runs."""
    from powernorm.cli.health import print_health
    from powernorm.norms.checkpointing import CallRecords
    from powernorm.ops import torch_private

    def broken(*_: object) -> None:
        raise AttributeError("no attribute '__func__'")

    monkeypatch.setattr(torch_private, "NEWEST_TESTED", (1, 0))
    monkeypatch.setattr(CallRecords, "replay", broken)
    assert not print_health()
    lines = capsys.readouterr().out.splitlines()
    assert "bn: FAILED: AttributeError: no attribute '__func__'" in lines
    assert not any(line.startswith("ln: FAILED") for line in lines)
    assert any(line.startswith("warning: powernorm was tested with torch up to ") for line in lines)


def test_an_untested_torch_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import powernorm
    from powernorm.ops import torch_private

    torch_private.warn_of_untested_torch.cache_clear()
    powernorm.LayerNorm(2)
    monkeypatch.setattr(torch_private, "NEWEST_TESTED", (1, 0))
    torch_private.warn_of_untested_torch.cache_clear()
    with pytest.warns(UserWarning, match=r"tested with torch up to .*powernorm doctor"):
        powernorm.LayerNorm(2)
    powernorm.BatchNorm(2)


def test_doctor_knows_a_forced_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERNORM_BACKEND", "eager")
    outcome = powernorm(tmp_path, "doctor", fresh=True)
    assert outcome.code == 0
    assert "on the CPU your models use: eager" in outcome.out.splitlines()


def test_doctor_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERNORM_CPU_LIBRARY", str(tmp_path / "absent.so"))
    outcome = powernorm(tmp_path, "doctor")
    assert outcome.code == 0
    text = " ".join(outcome.out.split())
    assert "cpu: not available: the kernels are not there: it was never built" in text
    assert "on the CPU your models use: eager" in text


def test_doctor_sees_wrong_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that answers and computes nothing: the exit code says so too."""
    source = tmp_path / "lying.cpp"
    sizes = "#include <stddef.h>\n#include <stdint.h>\n"
    from powernorm.ops.kernels.cpu.loading import load_library

    library = load_library().functions
    assert library is not None
    task, update = library.powernorm_task_size(), library.powernorm_update_size()
    source.write_text(
        sizes
        + f"""extern "C" {{
size_t powernorm_task_size() {{ return {task}; }}
size_t powernorm_update_size() {{ return {update}; }}
int powernorm_run(int, const void*) {{ return 0; }}
int powernorm_update(const void*, const void*) {{ return 0; }}
const char* powernorm_instruction_set() {{ return "none"; }}
int powernorm_use_instruction_set(const char*) {{ return 0; }}
int64_t powernorm_set_stream_bytes(int64_t) {{ return 0; }}
int powernorm_uses_openmp() {{ return 0; }}
}}"""
    )
    lying = tmp_path / "lying.so"
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", lying], check=True)
    monkeypatch.setenv("POWERNORM_CPU_LIBRARY", str(lying))
    outcome = powernorm(tmp_path, "doctor")
    assert outcome.code == 1
    assert "WRONG: " in outcome.out


@pytest.mark.slow
def test_doctor_finds_all_kernels_right(tmp_path: Path) -> None:
    outcome = powernorm(tmp_path, "doctor", "--kernels", fresh=True)
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"^cpu: 1\d{3} calls$", outcome.out, re.MULTILINE)
    assert sum(": right (largest error: " in line for line in outcome.out.splitlines()) >= 4
    assert outcome.out.endswith("all calls are right\n")


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.01, 1)])
def test_doctor_checks_kernels(
    factor: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from powernorm.cli.machine import doctor
    from powernorm.norms import kernel_check
    from powernorm.ops.kernels import cpu

    right, cases = cpu.batch_norm, kernel_check.select_cases()
    few = [case for case in cases if case.setting.norm == "pnv" and case.input.shape == (3, 7, 16)]

    def scaled(*args: Any) -> Any:
        found = right(*args)
        found[0].mul_(factor)
        return found

    monkeypatch.setattr(kernel_check, "select_cases", lambda: few)
    monkeypatch.setattr(cpu, "batch_norm", scaled)
    if code:
        with pytest.raises(typer.Exit):
            doctor(kernels=True)
    else:
        doctor(kernels=True)
    said = capsys.readouterr().out
    assert ("  float32: WRONG: pnv (largest error: " in said) == bool(code)
    assert ("\nWRONG on cpu: Case(setting=Setting(norm='pnv'" in said) == bool(code)
    last = said.splitlines()[-1]
    assert re.fullmatch(r"\d of \d+ calls are WRONG" if code else "all calls are right", last)


def test_a_backend_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERNORM_BACKEND", "fpga")
    message = powernorm(tmp_path, "doctor", fresh=True).refused()
    assert "backend is 'fpga', expected one of eager, cpu, triton" in message


def test_recorded_rows_are_shown_and_drawn(measured: tuple[Path, Outcome]) -> None:
    folder, before = measured
    lines = (folder / "new" / "rows.jsonl").read_text().splitlines()
    assert "machine" in json.loads(lines[0])
    assert all("median_us" in json.loads(line) for line in lines[1:])
    shown = powernorm(folder, "bench", "--show", "new/rows.jsonl", "--plot", "again.svg")
    assert shown.code == 0, shown.err
    table, _, _ = before.out.partition("rows: ")
    assert shown.out == f"{table}plot: again.svg\n"
    assert (folder / "again.svg").exists()


def test_rows_that_cannot_be_shown(tmp_path: Path) -> None:
    assert (
        "absent.jsonl holds no results"
        in powernorm(tmp_path, "bench", "--show", "absent.jsonl").refused()
    )
    assert (
        "--show measures nothing"
        in powernorm(tmp_path, "bench", "--show", "a.jsonl", "--out", "b.jsonl").refused()
    )
