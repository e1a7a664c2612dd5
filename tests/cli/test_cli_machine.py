"""`powernorm doctor` as a subprocess."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import typer

from commands import powernorm
from powernorm.norms.kernel_check.cases import Case
from powernorm.norms.kernel_check.checking import Reference


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
    outcome = powernorm(tmp_path, "doctor", "--kernels", "--case", "5")
    assert outcome.code == 1
    assert "FAILED on cpu:" in outcome.out
    assert "again: powernorm doctor --kernels --seed 0 --case 5" in outcome.out
    assert "FAILED on eager" not in outcome.out


def test_doctor_checks_a_single_case(tmp_path: Path) -> None:
    outcome = powernorm(tmp_path, "doctor", "--kernels", "--seed", "3", "--case", "4", fresh=True)
    assert (outcome.code, outcome.err) == (0, "")
    assert "ok on eager:" in outcome.out
    assert "  setting: " in outcome.out
    assert "cpu: on the CPU, 1 threads" in outcome.out
    printed = powernorm(tmp_path, "doctor", "--kernels", "--case", "4", "--seed", "3", "--json")
    assert (printed.code, printed.err) == (0, "")
    found = json.loads(printed.out)
    assert (found["seed"], found["checked"], found["num_cases"]) == (3, 1, 1)
    assert found["backends"]["eager"]["cases"] == 1
    assert found["rows"][0]["failures"] == 0
    assert found["cases"][0]["index"] == 4
    assert 0 <= found["cases"][0]["errors"]["y"] < found["allowed_error"]


@pytest.mark.slow
def test_doctor_finds_all_kernels_right(tmp_path: Path) -> None:
    outcome = powernorm(tmp_path, "doctor", "--kernels", "--seed", "11")
    assert (outcome.code, outcome.err) == (0, "")
    assert "FAILED" not in outcome.out
    assert re.search(r"seed 11: all \d{4} calls are right", outcome.out)


def test_an_interrupted_check_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from powernorm.cli.kernel_check import check_all_kernels
    from powernorm.norms.kernel_check import running

    right, calls = running.reference, []

    def interrupted(case: Case) -> Reference:
        calls.append(case)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right(case)

    monkeypatch.setattr(running, "reference", interrupted)
    with pytest.raises(typer.Exit) as ended:
        check_all_kernels(0, None, as_json=True)
    assert ended.value.exit_code == 130
    printed = capsys.readouterr()
    assert re.fullmatch(r"interrupted: 2 of \d+ cases were checked\n", printed.err)
    assert json.loads(printed.out)["checked"] == 2
    assert json.loads(printed.out)["backends"]["eager"]["cases"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seed", "1"), "--seed is for the check of --kernels: add --kernels"),
        (("--json",), "--json is for the check of --kernels: add --kernels"),
        (("--kernels", "--case", "99999"), "case is 99999, expected a number from 0 to "),
    ],
)
def test_doctor_refuses(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in powernorm(tmp_path, "doctor", *options).refused()


def test_a_backend_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERNORM_BACKEND", "fpga")
    message = powernorm(tmp_path, "doctor", fresh=True).refused()
    assert "backend is 'fpga', expected one of eager, cpu, triton" in message
