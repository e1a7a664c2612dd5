"""Closed and full standard streams: one line, or none and the shells' code, and no traceback."""

import subprocess
from pathlib import Path

import pytest

from commands import SECONDS, arguments, environment
from lab.report.synthetic import write_comparison


def shell(folder: Path, redirections: str, *parts: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command behind redirections, such as `<&-`; `$?` is that of the command."""
    script = f'"$@" {redirections}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(
        ["bash", "-c", script, "bash", *arguments(*parts)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(folder),
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirections", "message"),
    [("<&-", "standard input is closed"), (">&-", "standard output is closed")],
)
def test_a_translation_without_a_stream(redirections: str, message: str, tmp_path: Path) -> None:
    """Said before a model is looked for, let alone loaded."""
    done = shell(tmp_path, redirections, "translate", "nowhere")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {message}: powernorm translate RUN < sentences > translations"
    ]


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
        "error: the output cannot be written (No space left on device): make room, or give "
        "another place"
    ]
