"""Kill -9 in the middle of a text, and going on with what the model remembers of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tiny_characters import tiny_characters, write_stream

from lab.training.same_runs import assert_same_run
from powernorm.lab.tasks.builtin import compare

SECONDS = 300
"""After which the subprocess counts as hung; far more than it needs."""

KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from pathlib import Path
from tiny_characters import tiny_characters
from powernorm.lab.tasks.builtin import compare
from powernorm.lab.engine.events import StepsDone

def kill(event):
    if isinstance(event, StepsDone) and event.step >= 7:
        os.kill(os.getpid(), signal.SIGKILL)

compare(tiny_characters(Path({stream!r}), norms=("pn",)), Path({out!r}), on_event=kill)
"""


def test_killed_and_resumed(tmp_path: Path) -> None:
    stream = write_stream(tmp_path / "stream")
    out = tmp_path / "killed"
    script = KILLED.format(tests=str(Path(__file__).parent), stream=str(stream), out=str(out))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    config = tiny_characters(stream, norms=("pn",))
    compare(config, tmp_path / "whole")
    (run,) = compare(config, out, resume=True)["runs"]
    assert run["status"] == "finished"
    assert_same_run(tmp_path / "whole/pn-post-seed0", out / "pn-post-seed0")
