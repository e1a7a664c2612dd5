"""Run a subject in child processes, kill them after random times, and finally complete it.

    python killing.py SUBJECT FOLDER KILLS SEED
    python killing.py SUBJECT FOLDER MOMENTS

`FOLDER/whole` is the uninterrupted result, `FOLDER/killed-*` the interrupted ones. With a seed, it
prints the counts of the children's exits as JSON. Without one, children are killed before changes
of their folder and not resumed: at MOMENTS changes (0: all), whose number is printed.
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
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
CORE = HERE.parents[2] / "tests"
WAYS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SUBJECTS = ("lm", "lm-char", "classify", "translation", "own", "tune", "race", "remove")
"""Built-in tasks, a user's function, and commands that train with them."""

ENGINES: dict[str, dict[str, Any]] = {
    "local": {},
    "ray": {"executor": "ray"},
    "slurm": {"executor": "slurm", "executor_options": {"cluster": "local"}},
}
"""Comparisons whose runs are trained by other processes, two at a time."""

CHANGED = "short-translation"
"""Run with all kinds of files, short enough to be killed before each change of a file."""

CHANGES = ("os.rename", "os.remove", "shutil.copyfile")

IMPORTED = (
    *("own_training", "racing", "recorded_runs", "small_models", "tiny_translation", "valleys"),
    *("powernorm_lab.tuning.norm_studies", "powernorm_lab.removal.removing"),
)
"""Modules to import before forking children, so that kills hit training and not imports."""


def train(subject: str, out: Path) -> None:
    """Start or resume the subject in this folder."""
    import racing
    import valleys
    from recorded_runs import recorded_config
    from small_models import data, stack
    from tiny_training import compare
    from tiny_translation import short_translation, write_pairs

    import own_training
    import powernorm_lab as lab
    from powernorm_lab.engine.grid_training import compare_grid

    if subject == "own":
        compare_grid(own_training.tiny_grid(norms=["bn", "pn"]), out, resume=True)
    elif subject in ENGINES:
        # One process trains the uninterrupted result.
        workers = {} if out.name == "whole" else {"jobs": 2, **ENGINES[subject]}
        lab.compare(
            own_training.train,
            out,
            norms=["ln", "bn", "rbn", "pn"],
            seeds=2,
            goal={"accuracy": "max"},
            settings={"steps": 60, "checkpoint_every": 4},
            device="cpu",
            num_threads=1,
            quiet=True,
            resume=True,
            **workers,
        )
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
        lab.remove(original, out, settings=settings, device="cpu", quiet=True, resume=True)
    elif subject == CHANGED:
        compare(short_translation(write_pairs(out.parent / "pairs")), out, resume=True)
    else:
        compare(replace(recorded_config(subject), norms=("bn", "pn")), out, resume=True)


def child(subject: str, out: Path) -> int:
    """Fork a process that trains, and return its id."""
    from powernorm_lab.engine.stopping import EXIT_CODE, Stopped

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


def count_changes(subject: str, out: Path, moment: int) -> int:
    """Train, killed before the change of that number in this folder, and count the changes."""
    count = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        is_change = event in CHANGES or (event == "open" and args[1] and args[1][0] in "wax")
        if is_change and str(args[0]).startswith(str(out)):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train(subject, out)
    return count


def killed_before(subject: str, out: Path, moment: int) -> tuple[int, bytes]:
    """Train in a child; return its status and what it counted."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.write(writer, str(count_changes(subject, out, moment)).encode())
        os._exit(0)
    os.close(writer)
    return ended(process), os.read(reader, 100)


def kill_before_changes(subject: str, folder: Path, moments: int) -> int:
    """Kill children before `moments` changes of their folder, 0 for all, and count the changes."""
    status, counted = killed_before(subject, folder / "whole", 0)
    assert status == 0
    total = int(counted)
    step = (total - 1) / (moments - 1) if moments else 1
    for index in range(moments or total):
        moment = 1 + round(index * step)
        status, _ = killed_before(subject, folder / f"killed-{moment}", moment)
        assert os.WIFSIGNALED(status), (moment, status)
        assert os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
    return total


def train_whole(subject: str, out: Path) -> float:
    """Train without a kill, and return the seconds it took."""
    began = time.monotonic()
    assert ended(child(subject, out)) == 0
    return time.monotonic() - began


def kill_and_resume(subject: str, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Return the numbers of children that finished, were killed, stopped or interrupted."""
    from powernorm_lab.engine.stopping import EXIT_CODE

    warm = train_whole(subject, folder / "warm")  # fills the caches
    whole = train_whole(subject, folder / "whole")
    seconds = warm if subject in ENGINES else whole
    chance = random.Random(seed)
    counts: dict[str, int] = {}
    chain = hits = 0
    out = folder / "killed-0"
    while hits < kills:
        out = folder / f"killed-{chain}"
        process = child(subject, out)
        time.sleep(chance.uniform(0, seconds))
        way = chance.choice(WAYS)
        os.kill(process, way)  # a zombie accepts signals until its status is read
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
        *(str(HERE / name) for name in ("", "engine", "tuning", "training", "frozen")),
        str(CORE / "surgery/removal"),
    ]
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # a cluster's workers import them, too
    for module in IMPORTED:
        importlib.import_module(module)
    what, where, how_often, *drawn_by = sys.argv[1:]
    if drawn_by:
        counts = kill_and_resume(what, Path(where), int(how_often), int(drawn_by[0]))
        sys.stdout.write(json.dumps(counts) + "\n")
    else:
        sys.stdout.write(f"{kill_before_changes(what, Path(where), int(how_often))}\n")
