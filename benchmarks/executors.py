"""Cost of an executor: many short runs that only wait, so that the rest is the executor's.

    python benchmarks/executors.py benchmarks/results/executors.jsonl

A row per executor: 200 runs of one second (they sleep), two at a time, against the same in a
single process; the wall time, and the part of it above the pure waiting time, in seconds per run.
Executors that are in the file are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import powernorm_lab as lab

NUM_RUNS, RUN_SECONDS, JOBS = 200, 1.0, 2
EXECUTORS: dict[str, dict[str, Any]] = {
    "serial": {},
    "local": {"executor": "local", "jobs": JOBS},
    "ray": {"executor": "ray", "jobs": JOBS},
    "slurm, cluster=local": {
        "executor": "slurm",
        "jobs": JOBS,
        "executor_options": {"cluster": "local"},
    },
}


def wait(run: lab.Run, seconds: float = RUN_SECONDS) -> dict[str, float]:
    run.build_norm(8)  # a run without a norm is refused
    time.sleep(seconds)
    return {"done": 1.0}


def measured(name: str, num_runs: int) -> dict[str, Any]:
    """Return the row of an executor."""
    options = EXECUTORS[name]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        found = lab.compare(
            wait,
            folder,
            norms=["ln"],
            seeds=num_runs,
            goal={"done": "max"},
            device="cpu",
            num_threads=1,
            quiet=True,
            **options,
        )
        seconds = time.perf_counter() - begin
    assert [run.status for run in found.runs] == ["finished"] * num_runs
    jobs = options.get("jobs", 1)
    waiting = num_runs * RUN_SECONDS / jobs
    return {
        "executor": name,
        "runs": num_runs,
        "run_seconds": RUN_SECONDS,
        "jobs": jobs,
        "seconds": round(seconds, 2),
        "overhead_per_run": round((seconds - waiting) * jobs / num_runs, 4),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    given = parser.parse_args()
    text = given.file.read_text(encoding="utf-8") if given.file.exists() else ""
    known = {json.loads(line)["executor"] for line in text.splitlines()}
    for name in EXECUTORS:
        if name not in known:
            row = measured(name, given.runs)
            print(row)
            with given.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
