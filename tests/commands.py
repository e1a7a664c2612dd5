"""Starting `powernorm …` like a user, in its own process, folder and cache.

Most of a short command is the import of torch and its friends. `powernorm` therefore forks a server
that has them; `fresh=True` starts a new Python, which each command does in at least one test.
`refusal` runs a command that is to be refused in this process, which costs next to nothing.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from forking import own_packages

SECONDS = 240
"""After which a subprocess counts as hung; far more than it needs."""

SMALL = (
    *("--set", "data.vocabulary_size=300"),
    *("--set", "data.sequence_length=8"),
    *("--set", "data.batch_size=4"),
    *("--set", "model.num_features=8"),
    *("--set", "model.feedforward_features=8"),
)
"""Over the smoke preset: so small that the start of the process is most of it."""

_SERVER = multiprocessing.get_context("forkserver")


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def refused(self) -> str:
        """The one line of an error."""
        assert self.code == 2, self.err
        assert self.out == ""
        assert re.fullmatch(r"error: [^\n]+\n", self.err), self.err
        return self.err


def arguments(*parts: str | Path) -> list[str]:
    return [
        sys.executable,
        *("-W", "error::DeprecationWarning:powernorm"),
        *("-m", "powernorm"),
        *map(str, parts),
    ]


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "POWERNORM_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }


def start(folder: Path, *parts: str | Path) -> subprocess.Popen[str]:
    """Start a command in the folder, in a new Python, without waiting for it."""
    return subprocess.Popen(
        arguments(*parts),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def powernorm(tmp_path: Path, *parts: str | Path, fresh: bool = False) -> Outcome:
    """Run a command in the folder to its end."""
    if fresh:
        done = subprocess.run(
            arguments(*parts),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(tmp_path),
            timeout=SECONDS,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _SERVER.Process(
            target=_run, args=([*map(str, parts)], str(tmp_path), environment(tmp_path), out, err)
        )
        with own_packages():
            process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"powernorm {parts} did not end in {SECONDS} s: {err.read_text()}")
        return Outcome(process.exitcode, out.read_text("utf-8"), err.read_text("utf-8"))


def refusal(folder: Path, *parts: str | Path) -> str:
    """Run a command in this process and the folder, and return the one line of its error."""
    from powernorm.cli import main

    out, err = io.StringIO(), io.StringIO()
    before, handler = set(sys.modules), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["powernorm", *map(str, parts)])
        patch.syspath_prepend(folder)
        for name, value in environment(folder).items():
            patch.setenv(name, value)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.signal(signal.SIGINT, handler)
            for name in sys.modules.keys() - before:
                module = sys.modules[name]
                places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
                if any(place and Path(place).is_relative_to(folder) for place in places):
                    del sys.modules[name]
    return Outcome(int(ended.value.code or 0), out.getvalue(), err.getvalue()).refused()


def _run(parts: list[str], folder: str, variables: dict[str, str], out: Path, err: Path) -> None:
    """Be `python -m powernorm` in a process that has most modules already."""
    import torch

    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", category=DeprecationWarning, module="powernorm")
    sys.argv[1:] = parts
    sys.path.insert(0, folder)
    runpy.run_module("powernorm", run_name="__main__", alter_sys=True)
