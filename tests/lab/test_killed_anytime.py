"""Killed at any moment, in whatever way, a comparison that goes on comes to the same results."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUBJECTS = ("lm", "tag", "translation", "own")

SCRIPT = '''
"""Trains a comparison in children, kills them after random times, and lets it come to its end."""
import json, os, random, signal, sys, time
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from pathlib import Path
from own_training import tiny_grid
from powernorm.lab.engine.grid_training import compare_grid
from powernorm.lab.engine.stopping import EXIT_CODE, Stopped
from powernorm.lab.tasks.builtin import compare
from recorded_runs import recorded_config
from dataclasses import replace

subject, folder, kills, seed = {subject!r}, Path({folder!r}), {kills}, {seed}
WAYS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def train(out):
    if subject == "own":
        compare_grid(tiny_grid(norms=["bn", "pn"]), out, resume=True)
    else:
        config = replace(recorded_config(subject), norms=("bn", "pn"))
        compare(config, out, resume=True)


def child(out):
    process = os.fork()
    if process:
        return process
    sys.stderr = open(os.devnull, "w")
    try:
        train(out)
        os._exit(0)
    except Stopped:
        os._exit(EXIT_CODE)
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)


def ended(process):
    _, status = os.waitpid(process, 0)
    return status


def train_whole(out):
    began = time.monotonic()
    assert ended(child(out)) == 0
    return time.monotonic() - began


train_whole(folder / "warm")  # fills the caches
seconds = train_whole(folder / "whole")
chance = random.Random(seed)
counts = {{}}
chain = hits = 0
while hits < kills:
    out = folder / f"killed-{{chain}}"
    process = child(out)
    time.sleep(chance.uniform(0, seconds))
    way = chance.choice(WAYS)
    os.kill(process, way)  # one that has ended waits to be asked for its status
    status = ended(process)
    if os.WIFSIGNALED(status):
        end = "killed"
    else:
        code = os.WEXITSTATUS(status)
        assert code in (0, EXIT_CODE, 130), (way, code)
        end = {{0: "over", EXIT_CODE: "stopped", 130: "interrupted"}}[code]
    counts[end] = counts.get(end, 0) + 1
    hits += end != "over"
    chain += end == "over"
if out.exists():
    assert ended(child(out)) == 0
print(json.dumps(counts))
'''


@dataclass(frozen=True)
class Killed:
    folder: Path
    counts: dict[str, int]


def killed(tmp_path: Path, subject: str, kills: int) -> Killed:
    paths = [str(TESTS / name) for name in ("lab", "frozen", "lab/training")]
    script = SCRIPT.format(
        paths=paths,
        subject=subject,
        folder=str(tmp_path),
        kills=kills,
        seed=random.Random(subject).randrange(1000),
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120 + 60 * kills,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Killed(tmp_path, json.loads(done.stdout.strip().splitlines()[-1]))


def rows(path: Path) -> list[str]:
    """Lines of a log without what the clock says."""
    header, *lines = path.read_text().splitlines()
    place = header.split(",").index("seconds") if "seconds" in header else None
    cells = [line.split(",") for line in (header, *lines)]
    return [",".join(c for i, c in enumerate(line) if i != place) for line in cells]


def said(path: Path) -> dict[str, object]:
    """A result without speeds and times."""
    result = json.loads(path.read_text())
    for name in ("seconds", "tokens_per_second", "examples_per_second"):
        result.pop(name, None)
    result["metrics"].pop("decoding_tokens_per_second", None)
    return dict(result)


def assert_same_comparison(one: Path, other: Path) -> None:
    names = sorted(path.parent.name for path in one.glob("*/result.json"))
    assert len(names) == 2
    assert names == sorted(path.parent.name for path in other.glob("*/result.json"))
    for name in names:
        assert said(one / name / "result.json") == said(other / name / "result.json"), other
        for log in ("metrics.csv", "norms.csv"):
            assert rows(one / name / log) == rows(other / name / log), (other, log)
    assert not list(other.rglob(".*")), other
    statuses = [run["status"] for run in json.loads((other / "results.json").read_text())["runs"]]
    assert statuses == ["finished"] * 2


def check(tmp_path: Path, subject: str, kills: int) -> Killed:
    found = killed(tmp_path, subject, kills)
    folders = sorted(tmp_path.glob("killed-*"))
    assert folders
    for out in folders:
        assert_same_comparison(tmp_path / "whole", out)
    assert sum(number for end, number in found.counts.items() if end != "over") == kills
    return found


@pytest.mark.parametrize("subject", ["own", pytest.param("lm", marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path: Path, subject: str) -> None:
    check(tmp_path, subject, 4)


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_killed_at_many_random_moments(tmp_path: Path, subject: str) -> None:
    found = check(tmp_path, subject, 25)
    assert set(found.counts) >= {"killed", "stopped"}
