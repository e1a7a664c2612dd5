"""Recorded runs, whose numbers must not change when the laboratory does.

`python packages/lab/tests/frozen/recorded_runs.py [CASE…]` trains them into `recorded`. Use it only
for intended changes of the numbers, and for new cases.
"""

from __future__ import annotations

import csv
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from loop_checkpoints import state_of_run, write_checkpoint
from recorded_states import read_state, write_state
from torch import nn

from powernorm_lab.engine.events import Event, StepsDone
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.recipes import recipe
from powernorm_lab.recipes.studies import study_config
from powernorm_lab.runs import TASKS as TASK_NAMES
from powernorm_lab.settings.comparison import ComparisonSettings, Notes
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.builtin import grid_of

RUNS: Final = Path(__file__).parent / "recorded"
STEPS: Final = 20
HALF: Final = 10
NORMS: Final = "ln,bn,rbn,pn"
BUFFERS: Final = "buffers.json"
STATE: Final = "state-10.safetensors.xz"
PROCESSOR: Final = RUNS / "processor.txt"
"""`fingerprint` of the processor that recorded the runs."""
LOGS: Final = ("metrics.csv", "norms.csv")
_SHORT: Final = (
    f"training.max_steps={STEPS}",
    f"training.validate_every={HALF}",
    "training.log_every=1",
    "training.monitor_every=5",
    "training.tid_batches=2",
    "training.num_threads=1",
)
TASKS: Final = tuple(TASK_NAMES)
OTHERS: Final = ("early-stop", "averaging", "study", "float16", "accumulation")
IN_PROCESSES: Final = {
    "translation-two-processes": ("translation", "bn,pn", ()),
    "lm-two-processes": ("lm", "bn,pn", ("optimizer.accumulation=2",)),
    "fsdp2": ("lm", "ln,rbn", ("training.strategy=fsdp2",)),
}
"""The task, norms and settings of comparisons in two processes."""
TIMES: Final = frozenset({"seconds"})
ONE_WAY: Final = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "POWERNORM_BACKEND": "eager",
    "OMP_NUM_THREADS": "1",
}
"""Environment in which processors of different vendors add numbers in the same order."""


def recorded_config(case: str) -> ComparisonSettings:
    """Return the settings of a recorded comparison."""
    if case in TASKS:
        return override(recipe(case, "smoke"), (f"norms={NORMS}", *_SHORT))
    if case == "early-stop":
        # At this rate the loss on the valid split soon rises.
        changes = ("norms=ln,pn", *_SHORT, "training.validate_every=2", "training.patience=1")
        return override(recipe("lm", "smoke"), (*changes, "optimizer.learning_rate=0.3"))
    if case == "averaging":
        averaged = ("training.average_checkpoints=2", "training.average_statistics=average")
        return override(recipe("lm", "smoke"), ("norms=bn,pn", *_SHORT, *averaged))
    if case == "float16":
        return override(
            recipe("lm", "smoke"), ("norms=ln,rbn", *_SHORT, "training.precision=float16")
        )
    if case == "accumulation":
        changes = ("norms=rbn,pn", *_SHORT, "optimizer.accumulation=2", "training.log_every=3")
        return override(recipe("translation", "smoke"), changes)
    return study_config("lm", "lowest-layers", "smoke", list(_SHORT))


@contextmanager
def one_way() -> Iterator[ProcessPoolExecutor]:
    """Yield a process that computes equally on processors of different vendors."""
    context = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, ONE_WAY),
        ProcessPoolExecutor(1, context, _without_onednn) as executor,
    ):
        executor.submit(int).result()
        yield executor


def _without_onednn() -> None:
    # A folder that tests of other libraries may have made visible in the parent.
    sys.path[:] = [path for path in sys.path if path != str(Path(sys.prefix) / "foreign")]
    torch.set_num_threads(1)
    # It orders the sums of a convolution by the sizes of the processor's caches.
    torch.backends.mkldnn.set_flags(False)


def fingerprint() -> str:
    """Return the exact results of some training steps of common layers."""
    torch.manual_seed(0)
    layers = (nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 33), nn.Tanh())
    convolution = nn.Conv1d(33, 20, 3)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW([*model.parameters(), *convolution.parameters()], lr=0.1)
    for _ in range(5):
        found = convolution(model(torch.randn(7, 19, 48)).transpose(1, 2)).softmax(1)
        found.clamp_min(1e-6).log().mul(torch.randn(found.shape)).sum().backward()
        optimizer.step()
    kept = b"".join(p.detach().numpy().tobytes() for p in [*model.parameters(), found])
    return hashlib.sha256(kept).hexdigest()


def _stop_after(norm: str, step: int) -> Any:
    """Return a listener that stops the run of a norm like Ctrl-C."""

    def listen(event: Event) -> None:
        if isinstance(event, StepsDone) and event.norm == norm and event.step >= step:
            raise KeyboardInterrupt

    return listen


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a log without times."""
    with (folder / name).open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def buffers(folder: Path) -> dict[str, list[float]]:
    """Return the running statistics in a run's last checkpoint by name."""
    weights = state_of_run(folder).weights
    return {
        f"model.{name}": weights[name].flatten().tolist()
        for name in sorted(weights)
        if name.rpartition(".")[2].startswith(("running_", "num_"))
    }


def measured(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result without speeds and times."""
    speeds = ("decoding_tokens_per_second", "parsing_sentences_per_second")
    kept: dict[str, Any] = {key: result[key] for key in ("norm", "seed", "status", "tid")}
    metrics = {k: v for k, v in result["metrics"].items() if k not in speeds}
    return {**kept, "parameters": result["parameters"], "metrics": metrics}


def resumable(case: str) -> str | None:
    """Return the norm whose state in the middle is stored; None for images, as it has 5 MB."""
    others = dict.fromkeys(("image", "early-stop", "study", *IN_PROCESSES))
    kept = {"averaging": "bn", "float16": "rbn", "accumulation": "rbn"}
    return {**kept, **others}.get(case, "pn")


def train(case: str, out: Path) -> None:
    """Train a recorded comparison, in a process of `one_way`."""
    if case not in IN_PROCESSES:
        compare_grid(grid_of(recorded_config(case), Notes()), out)
        return
    task, norms, others = IN_PROCESSES[case]
    changes = [word for change in (*_SHORT, *others) for word in ("--set", change)]
    command = ("compare", task, "--preset", "smoke", "--norms", norms, "--devices", "2")
    subprocess.run(
        [sys.executable, "-m", "powernorm", *command, *changes, "--out", str(out)],
        check=True,
        capture_output=True,
        timeout=300,
    )


def interrupt(case: str, out: Path, step: int) -> Path:
    """Train one norm of a recorded comparison until Ctrl-C, in a process of `one_way`."""
    norm = str(resumable(case))
    with suppress(KeyboardInterrupt):
        alone = replace(recorded_config(case), norms=(norm,))
        compare_grid(grid_of(alone, Notes()), out, on_event=_stop_after(norm, step))
    (run,) = _run_folders(out)
    return run


def resume(case: str, out: Path) -> str:
    """Train one norm of a recorded comparison from its recorded state; return the run's name.

    This needs a process of `one_way`. The run starts normally and is interrupted at once; then its
    state and logs are replaced by the recorded ones.
    """
    run = interrupt(case, out, 1)
    for name in LOGS:
        with (RUNS / case / run.name / name).open(newline="") as file:
            reader = csv.DictReader(file)
            kept = [row for row in reader if int(row["step"]) <= HALF]
        with (run / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, reader.fieldnames or ())
            writer.writeheader()
            writer.writerows(kept)
    write_checkpoint(run, read_state(RUNS / case / STATE, out))
    config = replace(recorded_config(case), norms=(str(resumable(case)),))
    compare_grid(grid_of(config, Notes()), out, resume=True)
    return run.name


def _record(case: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        train(case, whole)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        shutil.copy(whole / "results.json", out)
        for run in _run_folders(whole):
            (out / run.name).mkdir()
            for file in ("config.json", "result.json", *LOGS):
                shutil.copy(run / file, out / run.name)
            (out / run.name / BUFFERS).write_text(json.dumps(buffers(run)) + "\n")
        if resumable(case) is not None:
            half = interrupt(case, Path(name) / "half", HALF + 1)
            write_state(out / STATE, state_of_run(half))


def _run_folders(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/config.json"))


def recorded() -> Iterator[str]:
    """Yield the names of all recorded comparisons."""
    yield from (*TASKS, *OTHERS, *IN_PROCESSES)


if __name__ == "__main__":
    with one_way() as process:
        for each in sys.argv[1:] or recorded():
            process.submit(_record, each, RUNS / each).result()
        PROCESSOR.write_text(process.submit(fingerprint).result() + "\n")
