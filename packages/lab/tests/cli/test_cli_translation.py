"""Comparisons of translation in several processes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from powernorm.cli.commands import app
from powernorm.errors import InputError
from powernorm_lab.cli import launching
from powernorm_lab.engine.stopping import EXIT_CODE

SECONDS = 240
"""Time after which a subprocess counts as hung, far more than it needs."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWERNORM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


FAULT = """
import os, signal
if os.environ.get("RANK") == "1" and os.environ.get("FAULT"):
    import powernorm_lab.training.losses as losses
    real = losses.TrainingLoss.forward
    number = 0

    def forward(self, batch):
        global number
        number += 1
        if number == 10:
            exec(os.environ["FAULT"])
        return real(self, batch)

    losses.TrainingLoss.forward = forward
"""


def comparison(pairs: Path, *more: str | Path) -> list[str]:
    settings = {
        "data.languages": "de-en",
        "data.vocabulary_size": "290",
        "data.batch_tokens": "48",
        "model.num_features": "16",
        "training.max_steps": "12",
        "training.log_every": "2",
        "training.validate_every": "4",
        "training.tid_batches": "2",
        "training.accelerator": "cpu",
    }
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    preset = ("compare", "translation", "--preset", "smoke", "--norms", "pn", "--data", pairs)
    return [
        sys.executable,
        "-m",
        "powernorm",
        *map(str, (*preset, *chosen, "--out", "runs", *more)),
    ]


def start(folder: Path, command: list[str], fault: str = "") -> subprocess.Popen[str]:
    (folder / "sitecustomize.py").write_text(FAULT)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "FAULT": fault, "COLUMNS": "80"},
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_a_lost_process_ends_all(pairs: Path, tmp_path: Path) -> None:
    command = comparison(pairs, "--devices", "2")
    fault = "os.kill(os.getpid(), signal.SIGKILL)"
    process = start(tmp_path, [*command, "--force"], fault)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    said = err.splitlines()[-1]
    assert said.startswith(
        "error: process 1 of 2 was lost (SIGKILL), and the others were stopped; resume with: "
        "powernorm compare translation"
    )
    assert said.endswith("--out runs --devices 2 --resume")
    assert len([line for line in err.splitlines() if line.startswith("error")]) == 1
    content = tmp_path / "runs" / "pn-pre-seed0" / "checkpoints" / "last.ckpt"
    assert torch.load(content, weights_only=True)["step"] == 8


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # (exit code, second) of each process.
        ([(-signal.SIGTERM, 5), (-signal.SIGKILL, 5)], 1),
        ([(-signal.SIGTERM, 4), (-signal.SIGKILL, 5)], 1),
        ([(launching.LOST_ANOTHER, 4), (7, 5)], 1),
        ([(launching.LOST_ANOTHER, 4), (-signal.SIGTERM, 5)], 1),
        ([(EXIT_CODE, 4), (-signal.SIGKILL, 5)], 1),
        ([(launching.LOST_ANOTHER, 4), (EXIT_CODE, 5)], 1),
        ([(EXIT_CODE, 5), (EXIT_CODE, 5)], 0),
        ([(7, 6), (9, 5)], 1),
        ([(7, 5), (9, 5)], 0),
        ([(-signal.SIGTERM, 5), (-signal.SIGTERM, 5)], 0),
    ],
)
def test_the_process_that_the_others_ended_with(ends: list[tuple[int, int]], first: int) -> None:
    failures = {
        rank: SimpleNamespace(exitcode=exitcode, timestamp=timestamp)
        for rank, (exitcode, timestamp) in enumerate(ends)
    }
    assert launching.first_to_fail(failures) == first  # type: ignore[arg-type]


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_go_on_to_the_report(pairs: Path, tmp_path: Path) -> None:
    command = comparison(pairs, "--devices", "2")
    process = start(tmp_path, command, "os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=SECONDS)
    process = start(tmp_path, [*command, "--resume"])
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "12 steps, from step 8" in err
    assert "report: runs/report.html" in out
    results = json.loads((tmp_path / "runs" / "results.json").read_text())
    (run,) = results["runs"]
    assert run["status"] == "finished"
    assert results["settings"]["machine"]["num_processes"] == 2
    assert run["metrics"]["test_bleu"] is not None


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ('raise RuntimeError("boom")', 1, r"error: process 1 of 2 failed \(exit code 1\), and"),
        ("os._exit(7)", 1, r"error: process 1 of 2 failed \(exit code 7\), and"),
        (
            'from powernorm.errors import InputError; raise InputError("odd input")',
            2,
            "error in process 1: odd input",
        ),
    ],
    ids=["exception", "exit", "bad input"],
)
def test_a_process_that_fails_ends_all(
    pairs: Path, tmp_path: Path, fault: str, code: int, message: str
) -> None:
    process = start(tmp_path, comparison(pairs, "--devices", "2"), fault)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, err
    assert re.match(message, err.splitlines()[-1]), err
    assert ("boom" in err) == ("boom" in fault)


@pytest.mark.distributed
@pytest.mark.slow
def test_interrupted_processes_end_with_one_message(pairs: Path, tmp_path: Path) -> None:
    command = comparison(pairs, "--devices", "2", "--set", "training.max_steps=4000")
    process = start(tmp_path, command)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 12," in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    lines = [line for line in err.splitlines() if not line.startswith("pn seed 0: step")]
    assert len(lines) == 1, err
    assert lines[0].startswith("interrupted; resume with: powernorm compare translation")
    assert lines[0].endswith("--resume")
    assert torch.load(tmp_path / "runs/pn-pre-seed0/checkpoints/last.ckpt", weights_only=True)


def test_bad_settings_are_said_once_before_processes_start(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(launching, "launch", lambda *_: started.append(1))
    base = ["compare", "translation", "--preset", "smoke", "--data", str(pairs), "--devices", "2"]
    for parts, message in (
        (["--norms", "ln,pm"], "unknown norm 'pm'"),
        (["--set", "model.decoder_norm=pm"], "unknown norm 'pm'"),
    ):
        result = CliRunner().invoke(app, [*base, *parts])
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    result = CliRunner().invoke(app, base)
    assert "--devices and torchrun both start processes" in str(result.exception)
    assert not started
