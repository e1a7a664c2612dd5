"""What the Tab key offers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from powernorm.cli.commands import app

BASH = """
eval "$(powernorm --show-completion bash)"
COMP_WORDS=(powernorm compare lm); COMP_CWORD=2
_powernorm_completion powernorm
echo "${COMPREPLY[@]}"
complete -p powernorm
"""


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("powernorm comp", ["compare"]),
        ("powernorm compare lm", ["lm", "lm-char"]),
        ("powernorm compare parse --preset p", ["petrogold", "ptb-xu2019"]),
        ("powernorm compare lm --study lo", ["lowest-layers"]),
        ("powernorm compare lm --thr", ["--threads"]),
        ("powernorm recipes t", ["tag", "translation"]),
        ("powernorm data get m", ["mnist", "msra"]),
        ("powernorm data where verses-", ["verses-de", "verses-en"]),
    ],
)
def test_names_are_completed(line: str, offers: list[str]) -> None:
    asked = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
        "_POWERNORM_COMPLETE": "complete_bash",
    }
    done = CliRunner().invoke(app, [], prog_name="powernorm", env=asked)
    assert done.output.split() == offers


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_takes_the_script_that_is_shown(tmp_path: Path) -> None:
    command = tmp_path / "powernorm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m powernorm "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", BASH],
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    offered, registered = done.stdout.splitlines()
    assert offered.split() == ["lm", "lm-char"]
    assert registered.endswith("-F _powernorm_completion powernorm")
