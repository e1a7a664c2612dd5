"""Kill -9 at any moment leaves files that load, and a run that goes on as if nothing had been."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.training.same_runs import assert_readable, assert_same_run
from lab.training.tiny_translation import short_translation, write_pairs
from powernorm.lab.tasks.builtin import compare

SECONDS = 120
"""After which a subprocess counts as hung; far more than it needs."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("killed") / "pairs")


KILLED = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
sys.path[:0] = {paths!r}
from pathlib import Path
from lab.training.tiny_translation import short_translation
from powernorm.lab.tasks.builtin import compare

folder, pairs, moments = Path({folder!r}), Path({pairs!r}), {moments!r}
CHANGES = ("os.rename", "os.remove", "shutil.copyfile")


def train(name, moment):
    '''Killed before its change number `moment` in the folder of its runs; returns their number.'''
    out, count = folder / name, 0

    def watch(event, args):
        nonlocal count
        is_change = event in CHANGES or (event == "open" and args[1] and args[1][0] in "wax")
        if is_change and str(args[0]).startswith(str(out)):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    compare(short_translation(pairs), out)
    return count


def in_child(name, moment):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(train(name, moment)).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    return status, os.read(reader, 100)


status, said = in_child("whole", None)
assert status == 0
total = int(said)
chosen = range(1, total + 1) if moments is None else [
    1 + round(i * (total - 1) / (moments - 1)) for i in range(moments)
]
for moment in chosen:
    status, _ = in_child(f"killed-{{moment}}", moment)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
print(total)
"""


def killed_everywhere(tmp_path: Path, pairs: Path, moments: int | None) -> None:
    tests = Path(__file__).parents[3]
    script = KILLED.format(
        paths=[str(tests)], folder=str(tmp_path), pairs=str(pairs), moments=moments
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS if moments else 10 * SECONDS,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folders = sorted(tmp_path.glob("killed-*"))
    assert len(folders) == (moments or int(done.stdout))
    for out in folders:
        assert_readable(out)
        (run,) = compare(short_translation(pairs), out, resume=True)["runs"]
        assert run["status"] == "finished", out.name
        assert_same_run(tmp_path / "whole" / "pn-pre-seed0", out / "pn-pre-seed0")
        # What a write left behind is gone when the run is over.
        assert not list(out.rglob(".*")), out.name


def test_killed_before_changes_of_its_folder(tmp_path: Path, pairs: Path) -> None:
    killed_everywhere(tmp_path, pairs, 4)


@pytest.mark.slow
def test_killed_before_every_change_of_its_folder(tmp_path: Path, pairs: Path) -> None:
    killed_everywhere(tmp_path, pairs, None)
