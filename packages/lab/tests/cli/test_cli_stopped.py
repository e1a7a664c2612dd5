"""A built-in task that a scheduler stops, and two commands on one folder."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from lab.tests.stopped_commands import stopped, wait_until

from commands import SECONDS, SMALL, powernorm, refusal, start

LONG = (
    *("compare", "lm", "--preset", "smoke", "--norms", "pn", "--out", "runs", *SMALL),
    *("--set", "training.max_steps=4000", "--set", "training.validate_every=4000"),
    *("--set", "training.tid_batches=0"),
)


def last_step(log: Path) -> int:
    return int(log.read_text().splitlines()[-1].partition(",")[0])


# The test of a user's function covers one process, too.
@pytest.mark.slow
@pytest.mark.parametrize(
    "processes",
    [(), pytest.param(("--devices", "2"), marks=pytest.mark.distributed)],
    ids=["one process", "two processes"],
)
def test_sigterm_saves_the_step_at_hand(tmp_path: Path, processes: tuple[str, ...]) -> None:
    """No validation has written a checkpoint before; two processes stop at the same step."""
    process = start(tmp_path, *LONG, *processes)
    log = tmp_path / "runs" / "pn-pre-seed0" / "metrics.csv"
    err = stopped(
        process,
        signal.SIGTERM,
        lambda: log.exists() and len(log.read_text().splitlines()) > 3,
    )
    assert [line for line in err.splitlines() if line.startswith("stopped")][-1].endswith(
        f"resume with: powernorm {' '.join([*LONG, *processes])} --resume"
    )
    (run,) = json.loads((tmp_path / "runs" / "results.json").read_text())["runs"]
    assert run["status"] == "interrupted"
    saved = last_step(log)
    # It continues after the last logged step, and can be stopped again.
    again = start(tmp_path, *LONG, "--resume")
    assert again.stderr is not None
    lines = iter(again.stderr.readline, "")
    begun = next(line for line in lines if "4000 steps" in line)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=SECONDS)
    assert int(begun.rpartition("step ")[2]) >= saved
    assert again.returncode == 75


@pytest.mark.slow
def test_the_second_of_two_commands_is_refused_and_the_first_is_not_harmed(
    tmp_path: Path, text_file: Path
) -> None:
    chosen = ("compare", "lm", "--preset", "smoke", "--norms", "ln,pn", "--out", "runs", *SMALL)
    chosen += ("--data", str(text_file), "--set", "training.max_steps=400")
    first = start(tmp_path, *chosen)
    wait_until((tmp_path / "runs" / "lease.json").exists, first)
    for option in ("", "--resume", "--force"):
        words = [*chosen, *([option] if option else [])]
        assert f"process {first.pid}" in refusal(tmp_path, *words)
    _, err = first.communicate(timeout=SECONDS)
    assert first.returncode == 0, err
    runs = json.loads((tmp_path / "runs" / "results.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["finished"] * 2


@pytest.mark.thinned(1)
@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "ImportError('half')", "SystemError"])
@pytest.mark.parametrize("command", ["norms", "compare", "tune", "remove", "work"])
def test_ctrl_c_while_torch_is_imported(tmp_path: Path, raised: str, command: str) -> None:
    """A package may convert the interrupt to another error during its import."""
    (tmp_path / "torch.py").write_text(
        "import signal\n"
        f"try:\n    signal.raise_signal(signal.SIGINT)\n"
        f"except KeyboardInterrupt:\n    raise {raised}\n"
    )
    more = {"compare": ("lm",), "tune": ("lm",), "remove": ("m:m", "--out", "o"), "work": ("o",)}
    done = powernorm(tmp_path, command, *more.get(command, ()), fresh=True)
    assert (done.code, done.out, done.err) == (130, "", "")


INTERRUPTED = """
import signal


def train(run, *, learning_rate: float = 1e-2, steps: int = 1):
    run.build_norm(4)
    if run.folder.name == "bn-trial1-seed1000":
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("half of a package") from None
    return {"valid_loss": learning_rate, "test_loss": learning_rate}


def failing(run, *, learning_rate: float = 1e-2, steps: int = 1):
    run.build_norm(4)
    if not run.is_trial:
        raise ValueError("boom")
    return {"valid_loss": learning_rate, "test_loss": learning_rate}
"""
TUNED = (
    *("--goal", "test_loss:min", "--norms", "ln,bn", "--trials", "2", "--out", "runs", "-q"),
    *("--search", "learning_rate=log:1e-4:1", "--device", "cpu"),
)


def test_a_tuning_ends_by_ctrl_c_whatever_a_trial_makes_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(INTERRUPTED)
    done = powernorm(tmp_path, "tune", "mine:train", *TUNED)
    assert done.code == 130, done.err
    assert done.err.splitlines()[-1].startswith("interrupted: runs has the finished runs")
    trial = json.loads((tmp_path / "runs/trials/bn-trial1-seed1000/result.json").read_text())
    assert trial["status"] == "interrupted"


def test_a_tuning_whose_runs_fail_fails(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(INTERRUPTED)
    done = powernorm(tmp_path, "tune", "mine:failing", *TUNED)
    assert done.code == 1, done.err
    assert done.err.splitlines()[-1].startswith("error: 2 of 2 runs failed, the first by ValueErr")
