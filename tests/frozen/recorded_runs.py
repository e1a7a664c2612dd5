"""Runs as they were before the laboratory was rebuilt: what was trained, and how it is kept.

`python tests/frozen/recorded_runs.py` trains them anew into tests/frozen/recorded: only where a
change of the numbers is meant.
"""

from __future__ import annotations

import csv
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from powernorm.lab.engine.events import Event, StepsDone
from powernorm.lab.engine.folders import LAST
from powernorm.lab.recipes import recipe
from powernorm.lab.recipes.studies import study_config
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.overrides import override
from powernorm.lab.tasks import TASKS as TASK_NAMES
from powernorm.lab.tasks.builtin import compare
from powernorm.lab.training.checkpoints import BEST, read_checkpoint
from powernorm.runs import CHECKPOINTS_FOLDER, RunResult

RUNS: Final = Path(__file__).parent / "recorded"
STEPS: Final = 20
HALF: Final = 10
NORMS: Final = "ln,bn,rbn,pn"
BUFFERS: Final = "buffers.json"
MIDDLE: Final = f"{CHECKPOINTS_FOLDER}/{LAST}.xz"
_SHORT: Final = (
    f"training.max_steps={STEPS}",
    f"training.validate_every={HALF}",
    "training.log_every=1",
    "training.monitor_every=5",
    "training.tid_batches=2",
    "training.num_threads=1",
)
TASKS: Final = tuple(TASK_NAMES)
OTHERS: Final = ("early-stop", "averaging", "study")
TWO_PROCESSES: Final = "translation-two-processes"
TIMES: Final = frozenset({"seconds"})


def recorded_config(case: str) -> ComparisonSettings:
    """The settings of a recorded comparison."""
    if case in TASKS:
        return override(recipe(case, "smoke"), (f"norms={NORMS}", *_SHORT))
    if case == "early-stop":
        # At this rate the loss on the valid split soon rises.
        changes = ("norms=ln,pn", *_SHORT, "training.validate_every=2", "training.patience=1")
        return override(recipe("lm", "smoke"), (*changes, "optimizer.learning_rate=0.3"))
    if case == "averaging":
        averaged = ("training.average_checkpoints=2", "training.average_statistics=average")
        return override(recipe("lm", "smoke"), ("norms=bn,pn", *_SHORT, *averaged))
    return study_config("lm", "lowest-layers", "smoke", list(_SHORT))


def stop_after(norm: str, step: int) -> Any:
    """A listener that stops the run of a norm as Ctrl-C does."""

    def listen(event: Event) -> None:
        if isinstance(event, StepsDone) and (event.norm, event.step) == (norm, step):
            raise KeyboardInterrupt

    return listen


def losses(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without what the clock says."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def buffers(folder: Path) -> dict[str, list[float]]:
    """The running statistics in a run's last checkpoint, by name."""
    weights = read_checkpoint(folder / CHECKPOINTS_FOLDER / LAST)["weights"]
    return {
        f"model.{name}": weights[name].flatten().tolist()
        for name in sorted(weights)
        if name.rpartition(".")[2].startswith(("running_", "num_"))
    }


def measured(result: RunResult) -> dict[str, Any]:
    """What a result says beside speeds and times."""
    speeds = ("decoding_tokens_per_second", "parsing_sentences_per_second")
    kept: dict[str, Any] = {key: result.get(key) for key in ("norm", "seed", "status", "tid")}
    metrics = {k: v for k, v in result["metrics"].items() if k not in speeds}
    return {**kept, "parameters": result["parameters"], "metrics": metrics}


def resumable(case: str) -> str | None:
    """The norm of which a checkpoint of the middle is kept; of images it would be 5 MB."""
    others = dict.fromkeys(("image", "early-stop", "study", TWO_PROCESSES))
    return {"averaging": "bn", **others}.get(case, "pn")


def train(case: str, out: Path) -> None:
    """Train a recorded comparison."""
    if case != TWO_PROCESSES:
        compare(recorded_config(case), out)
        return
    changes = [word for change in _SHORT for word in ("--set", change)]
    command = ("compare", "translation", "--preset", "smoke", "--norms", "bn,pn", "--devices", "2")
    subprocess.run(
        [sys.executable, "-m", "powernorm", *command, *changes, "--out", str(out)],
        check=True,
        capture_output=True,
        timeout=300,
    )


def _record(case: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        train(case, whole)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        shutil.copy(whole / "results.json", out)
        for run in _run_folders(whole):
            (out / run.name).mkdir()
            for file in ("config.json", "metrics.csv", "norms.csv", "result.json"):
                shutil.copy(run / file, out / run.name)
            (out / run.name / BUFFERS).write_text(json.dumps(buffers(run)) + "\n")
        norm = resumable(case)
        if norm is not None:
            config = recorded_config(case)
            half = Path(name) / "half"
            try:
                alone = replace(config, norms=(norm,))
                compare(alone, half, on_event=stop_after(norm, HALF + 1))
            except KeyboardInterrupt:
                (run,) = _run_folders(half)
                kept = out / "interrupted"
                kept.mkdir()
                shutil.copytree(run, kept / run.name)
                shutil.copy(half / "results.json", kept)
                _pack(kept / run.name)


def _pack(run: Path) -> None:
    """Compress the last checkpoint, and leave out what is the same."""
    shutil.rmtree(run / "tensorboard", ignore_errors=True)
    for path in (run / CHECKPOINTS_FOLDER).iterdir():
        if path.name == LAST:
            packed = lzma.compress(path.read_bytes(), preset=9)
            path.with_name(f"{LAST}.xz").write_bytes(packed)
        if path.name in (LAST, BEST):
            path.unlink()


def unpacked(case: str, out: Path) -> Path:
    """Copy the interrupted comparison of a case, with its checkpoints."""
    shutil.copytree(RUNS / case / "interrupted", out)
    (run,) = _run_folders(out)
    folder = run / CHECKPOINTS_FOLDER
    content = lzma.decompress((folder / f"{LAST}.xz").read_bytes())
    (folder / f"{LAST}.xz").unlink()
    # The only validation so far was the best.
    for name in (LAST, BEST):
        (folder / name).write_bytes(content)
    return run


def _run_folders(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/config.json"))


def recorded() -> Iterator[str]:
    """The names of all recorded comparisons."""
    yield from (*TASKS, *OTHERS, TWO_PROCESSES)


if __name__ == "__main__":
    for each in sys.argv[1:] or recorded():
        _record(each, RUNS / each)
