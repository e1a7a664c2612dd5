"""Completions of the Tab key."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """
eval "$(powernorm --show-completion bash)"
COMP_WORDS=(powernorm fold --kee); COMP_CWORD=2
_powernorm_completion powernorm
echo "${COMPREPLY[@]}"
complete -p powernorm
"""


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
    assert offered == "--keep"
    assert registered.endswith("-F _powernorm_completion powernorm")
