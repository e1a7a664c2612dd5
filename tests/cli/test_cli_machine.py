"""`powernorm doctor` as a subprocess."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import powernorm


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


@pytest.mark.slow
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
    assert "cpu: not available: the kernels are missing: it was never built" in text
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
    assert re.search(r"^cpu: .*, 1\d{3} calls$", outcome.out, re.MULTILINE)
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
