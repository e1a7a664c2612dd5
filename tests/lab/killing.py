"""Run a subject in children, kill them after random times, and let it come to its end.

    python killing.py SUBJECT FOLDER KILLS SEED

`FOLDER/whole` is what nobody interrupted, `FOLDER/killed-*` what was; how often a child ended in
which way is printed as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

TESTS = Path(__file__).parents[1]
WAYS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SUBJECTS = ("lm", "tag", "translation", "own", "tune", "race", "remove")
"""Built-in tasks, a user's function, and the commands that train by them."""

IMPORTED = (
    *("own_training", "racing", "recorded_runs", "small_models", "valleys"),
    *("powernorm.lab.tuning.norm_studies", "powernorm.lab.removal.removing"),
)
"""Before any child is forked: a kill must hit a training, not its imports."""


def train(subject: str, out: Path) -> None:
    """Begin the subject in this folder, or resume what is there."""
    import racing
    import valleys
    from own_training import tiny_grid
    from recorded_runs import recorded_config
    from small_models import data, stack

    import powernorm
    from powernorm import lab
    from powernorm.lab.engine.grid_training import compare_grid
    from powernorm.lab.tasks.builtin import compare

    if subject == "own":
        compare_grid(tiny_grid(norms=["bn", "pn"]), out, resume=True)
    elif subject == "tune":
        lab.tune(
            valleys.train,
            out,
            norms=["ln", "bn"],
            trials=5,
            search={"learning_rate": "log:1e-5:1"},
            goal={"test_loss": "min"},
            seeds=2,
            device="cpu",
            quiet=True,
            resume=True,
        )
    elif subject == "race":
        lab.compare(
            racing.train,
            out,
            norms=["ln", "rbn", "bn"],
            seeds=8,
            goal={"loss": "min"},
            race=lab.Race(),
            device="cpu",
            quiet=True,
            resume=True,
        )
    elif subject == "remove":
        torch.manual_seed(0)
        original: tuple[nn.Module, list[torch.Tensor]] = (stack(), data(12))
        settings = ("training.steps=20", "training.validations=2", "method.batches=3")
        powernorm.remove(original, out, settings=settings, device="cpu", quiet=True, resume=True)
    else:
        compare(replace(recorded_config(subject), norms=("bn", "pn")), out, resume=True)


def child(subject: str, out: Path) -> int:
    """Fork a process that trains, and return its id."""
    from powernorm.lab.engine.stopping import EXIT_CODE, Stopped

    process = os.fork()
    if process:
        return process
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the child lives
    code = 1
    try:
        train(subject, out)
        code = 0
    except Stopped:
        code = EXIT_CODE
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        sys.stdout.write(f"{error!r}\n")
        sys.stdout.flush()
    os._exit(code)


def ended(process: int) -> int:
    """Wait for a child, and return its status."""
    _, status = os.waitpid(process, 0)
    return status


def train_whole(subject: str, out: Path) -> float:
    """Train without a kill, and return the seconds it took."""
    began = time.monotonic()
    assert ended(child(subject, out)) == 0
    return time.monotonic() - began


def kill_and_resume(subject: str, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Return how often a child was over, killed, stopped or interrupted."""
    from powernorm.lab.engine.stopping import EXIT_CODE

    train_whole(subject, folder / "warm")  # fills the caches
    seconds = train_whole(subject, folder / "whole")
    chance = random.Random(seed)
    counts: dict[str, int] = {}
    chain = hits = 0
    out = folder / "killed-0"
    while hits < kills:
        out = folder / f"killed-{chain}"
        process = child(subject, out)
        time.sleep(chance.uniform(0, seconds))
        way = chance.choice(WAYS)
        os.kill(process, way)  # one that has ended waits to be asked for its status
        status = ended(process)
        if os.WIFSIGNALED(status):
            end = "killed"
        else:
            code = os.WEXITSTATUS(status)
            assert code in (0, EXIT_CODE, 130), (way, code)
            end = {0: "over", EXIT_CODE: "stopped", 130: "interrupted"}[code]
        counts[end] = counts.get(end, 0) + 1
        hits += end != "over"
        chain += end == "over"
    assert ended(child(subject, out)) == 0  # the last one was killed
    return counts


if __name__ == "__main__":
    sys.path[:0] = [
        *(str(TESTS / "lab" / name) for name in ("", "engine", "tuning", "training")),
        *(str(TESTS / name) for name in ("frozen", "surgery/removal")),
    ]
    torch.set_num_threads(1)
    for module in IMPORTED:
        importlib.import_module(module)
    what, where, how_often, drawn_by = sys.argv[1:]
    counts = kill_and_resume(what, Path(where), int(how_often), int(drawn_by))
    sys.stdout.write(json.dumps(counts) + "\n")
