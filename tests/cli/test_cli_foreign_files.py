"""Commands on files that somebody else has made to do harm."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from commands import powernorm, refusal
from powernorm import InputError, files
from powernorm.files import read_text
from powernorm_lab.engine.events import Notice
from powernorm_lab.engine.progress import ComparisonProgress
from powernorm_lab.report.loading import read_metrics

ESCAPE = "\x1b[2J"


def test_an_error_is_plain_text(tmp_path: Path) -> None:
    said = refusal(tmp_path, "fold", f"run{ESCAPE}")
    assert ESCAPE not in said
    assert "run�[2J" in said


def test_an_error_about_a_file_is_plain_text_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / f"run{ESCAPE}"
    folder.mkdir()
    os.mkfifo(folder / "results.json")
    said = refusal(tmp_path, "results", folder.name)
    assert "results.json is not a regular file" in said
    assert ESCAPE not in said


def test_tables_of_modules_are_plain_text(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "import torch\n"
        "model = torch.nn.Sequential()\n"
        f"model.add_module({'norm' + ESCAPE!r}, torch.nn.LayerNorm(4))\n"
    )
    swapped = powernorm(tmp_path, "swap", "theirs:model")
    assert swapped.code == 0, swapped.err
    assert "norm�[2J" in swapped.out
    assert ESCAPE not in swapped.out


def test_a_notice_is_plain_text() -> None:
    console = Console(file=io.StringIO(), width=80)
    with ComparisonProgress(console) as shown:
        shown(Notice(f"run{ESCAPE} has no checkpoint"))
    assert isinstance(console.file, io.StringIO)
    assert ESCAPE not in console.file.getvalue()
    assert "run�[2J has no checkpoint" in console.file.getvalue()


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_log_that_is_no_file_of_the_run_is_not_read(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "metrics.csv"
    if kind == "fifo":
        os.mkfifo(log)
    else:
        (tmp_path / "secret").write_text("step,tokens\n")
        log.symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"metrics\.csv is (a link|no regular file)"):
        read_metrics(log)


@pytest.mark.parametrize(
    ("limit", "said"),
    [("MAX_BYTES", "more than 8 bytes"), ("MAX_LINES", "8 lines"), ("MAX_LINE_BYTES", "a line")],
)
def test_logs_are_read_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, said: str
) -> None:
    log = tmp_path / "metrics.csv"
    log.write_text("long line, more than 8\n" + "\n" * 8)
    assert read_text(log) == log.read_text()
    monkeypatch.setattr(files, limit, 8)
    with pytest.raises(InputError, match=said):
        read_text(log)
