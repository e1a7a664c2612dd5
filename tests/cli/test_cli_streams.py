"""Closed and full standard streams: at most one line, the shells' exit codes, no traceback."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from lab.tests.report.synthetic import write_comparison

from commands import SECONDS, arguments, environment, powernorm


def shell(
    folder: Path, redirections: str, *parts: str | Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command behind redirections, such as `<&-`; `$?` is that of the command."""
    script = f'"$@" {redirections}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(
        ["bash", "-c", script, "bash", *arguments(*parts)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(folder) | dict(variables or {}),
        timeout=SECONDS,
        check=False,
    )


def test_output_that_nobody_reads(tmp_path: Path) -> None:
    """`| head` in a script with `set -o pipefail` tells this from a failure."""
    write_comparison(tmp_path / "demo")
    done = shell(tmp_path, "| true", "results", "demo")
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_finds_no_room(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    done = shell(tmp_path, "> /dev/full", "norms")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: the output cannot be written (No space left on device): free space, or give "
        "another path"
    ]


MODULE = """
def train(run, *, steps: int = 2, name: str = "γ"):
    run.track(norm=run.build_norm(4))
    for step, _ in run.steps([None] * steps):
        run.log(step, train_loss=1.0)
    return {"loss": 1.0}
"""
COMPARE = ("compare", "mine:train", "--goal", "loss:min", "--norms", "ln,bn", "--out", "runs")


def statuses(folder: Path) -> list[str]:
    runs = json.loads((folder / "runs" / "results.json").read_text("utf-8"))["runs"]
    return [run["status"] for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_has_no_letters_for_is_escaped(tmp_path: Path, encoding: str) -> None:
    """The table has a dash that neither has; JSON stays what it was."""
    (tmp_path / "mine.py").write_text(MODULE, "utf-8")
    shown = shell(tmp_path, "", *COMPARE, variables={"PYTHONIOENCODING": encoding})
    assert (shown.returncode, "\\u2013" in shown.stdout) == (0, True), shown.stderr
    again = (*COMPARE, "--resume", "--json")
    found = shell(tmp_path, "", *again, variables={"PYTHONIOENCODING": encoding})
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["settings"]["name"] == "γ"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.slow
@pytest.mark.parametrize(("stream", "code"), [(">", 2), ("2>", 0)])
def test_a_comparison_whose_output_finds_no_room_is_whole(
    tmp_path: Path, stream: str, code: int
) -> None:
    (tmp_path / "mine.py").write_text(MODULE, "utf-8")
    done = shell(tmp_path, f"{stream} /dev/full", *COMPARE)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert statuses(tmp_path) == ["finished"] * 2
    assert (tmp_path / "runs" / "report.html").exists()


@pytest.mark.parametrize("parent", ["", "runs/"])
def test_a_path_that_is_too_long_is_one_line_before_the_training(
    tmp_path: Path, parent: str
) -> None:
    (tmp_path / "mine.py").write_text(MODULE, "utf-8")
    tune = ("tune", *COMPARE[1:], "--select-by", "loss:min", "--search", "steps=int:1:2")
    for command in (COMPARE, tune):
        done = powernorm(tmp_path, *command, "--out", f"{parent}{'long' * 70}")
        assert "File name too long" in done.refused()
    assert not (tmp_path / "runs").exists()
