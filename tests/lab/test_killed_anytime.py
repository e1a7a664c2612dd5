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
from powernorm.lab.engine.comparing import compare_grid
from powernorm.lab.engine.stopping import EXIT_CODE, Stopped
from powernorm.training.comparison import compare
from recorded_runs import recorded_config
from dataclasses import replace

subject, folder, chains, kills, seed = {subject!r}, Path({folder!r}), {chains}, {kills}, {seed}
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
for chain in range(chains):
    out = folder / f"killed-{{chain}}"
    for _ in range(kills):
        process = child(out)
        time.sleep(chance.uniform(0, seconds))
        way = chance.choice(WAYS)
        try:
            os.kill(process, way)
        except ProcessLookupError:
            pass
        status = ended(process)
        if os.WIFSIGNALED(status):
            end = "killed"
        else:
            code = os.WEXITSTATUS(status)
            assert code in (0, EXIT_CODE, 130), (way, code)
            end = {{0: "over", EXIT_CODE: "stopped", 130: "interrupted"}}[code]
        counts[end] = counts.get(end, 0) + 1
    assert ended(child(out)) == 0
print(json.dumps(counts))
'''


@dataclass(frozen=True)
class Killed:
    folder: Path
    counts: dict[str, int]


def killed(tmp_path: Path, subject: str, *, chains: int, kills: int) -> Killed:
    paths = [str(TESTS / name) for name in ("lab", "frozen", "training")]
    script = SCRIPT.format(
        paths=paths,
        subject=subject,
        folder=str(tmp_path),
        chains=chains,
        kills=kills,
        seed=random.Random(subject).randrange(1000),
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120 + 30 * chains * kills,
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


def check(tmp_path: Path, subject: str, *, chains: int, kills: int) -> Killed:
    found = killed(tmp_path, subject, chains=chains, kills=kills)
    folders = sorted(tmp_path.glob("killed-*"))
    assert len(folders) == chains
    for out in folders:
        assert_same_comparison(tmp_path / "whole", out)
    print(subject, found.counts)  # noqa: T201
    assert sum(found.counts.values()) == chains * kills
    return found


@pytest.mark.parametrize("subject", ["own", "lm"])
def test_killed_at_random_moments(tmp_path: Path, subject: str) -> None:
    check(tmp_path, subject, chains=1, kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_killed_at_many_random_moments(tmp_path: Path, subject: str) -> None:
    found = check(tmp_path, subject, chains=5, kills=5)
    assert set(found.counts) >= {"killed", "stopped"}
