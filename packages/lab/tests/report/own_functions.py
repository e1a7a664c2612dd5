"""Folder of a comparison of a user's training function, written without training."""

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lab.tests.report.synthetic import made_result, made_tid, save, write_run

from powernorm.records import CONFIG_FILE
from powernorm_lab.runs import (
    COMPARISON_FILE,
    METRICS_COLUMNS,
    RESULT_FILE,
    RESULTS_FILE,
    ComparisonHead,
    ComparisonResults,
    FunctionRecord,
    RunResult,
)

TASK = "my.module:train"
FUNCTION = FunctionRecord(name=TASK, file="module.py", sha256="0123456789abcdef" * 4)
NORMS = ("ln", "bn", "pn")
SEEDS = (0, 1, 2)
ACCURACY = {"ln": 0.9123, "bn": 0.8931, "pn": 0.9218}
STEPS = range(10, 310, 10)
FAILED, UNFINISHED = ("bn", 1), ("pn", 2)


def write_own_comparison(
    folder: Path,
    *,
    norms: Sequence[str] = NORMS,
    seeds: Sequence[int] = SEEDS,
    metrics: Mapping[str, float | None] | None = None,
    logged: Mapping[str, float] | None = None,
    lost: Iterable[tuple[str, int]] = (FAILED, UNFINISHED),
    **head: object,
) -> Path:
    """Write the folder of a comparison and return it.

    Args:
        folder: folder of the comparison.
        norms: compared norms.
        seeds: seeds of each norm.
        metrics: metrics that the function returned in addition to accuracy and loss.
        logged: columns that it logged in addition to them.
        lost: whether one run failed and another is in progress.
        head: changed values of `comparison.json`.
    """
    failed, unfinished = (*lost, None, None)[:2]
    runs = []
    for norm in norms:
        for seed in seeds:
            broken = (norm, seed) in (failed, unfinished)
            result = _result(norm, seed, metrics or {}, failed=(norm, seed) == failed)
            _write_logs(folder, result, logged or {}, last=120 if broken else STEPS[-1])
            run = folder / result.folder
            config = {"task": TASK, "norm": norm, "seed": seed, "function": FUNCTION}
            (run / CONFIG_FILE).write_text(json.dumps(config))
            if (norm, seed) == unfinished:
                (run / RESULT_FILE).unlink()
            else:
                runs.append(result)
    told = replace(_head(norms, seeds), **head)
    save(folder / COMPARISON_FILE, told)
    save(folder / RESULTS_FILE, ComparisonResults(runs=runs, **vars(told)))
    return folder


def _head(norms: Sequence[str], seeds: Sequence[int]) -> ComparisonHead:
    return ComparisonHead(
        format=2,
        task=TASK,
        goal={"metric": "accuracy", "direction": "max"},
        function=FUNCTION,
        settings={
            "learning_rate": 3e-4,
            "steps": 300,
            "norms": list(norms),
            "seeds": list(seeds),
            "norm_options": {"pn": {"warmup_steps": 30}},
            "versions": {"torch": "2.13.0"},
            "machine": {"num_cpus": 2, "num_threads": 2},
            "date": "2026-11-23",
        },
    )


def _result(
    norm: str, seed: int, metrics: Mapping[str, float | None], *, failed: bool
) -> RunResult:
    accuracy = ACCURACY.get(norm, 0.9) + 0.004 * (seed - 1) + (0.001 if norm == "bn" else 0)
    found = {"accuracy": accuracy, "valid_loss": 1 - accuracy + 0.2, **metrics}
    return made_result(
        norm,
        seed,
        placement=None,
        status="failed" if failed else "finished",
        metrics={} if failed else found,
        tid=made_tid(centered=norm == "bn") if norm in ("bn", "pn") and not failed else None,
        seconds=41.5 + seed,
        parameters=1_204_736,
        message="RuntimeError: expected a batch of 2 or more rows" if failed else "",
    )


def _write_logs(folder: Path, result: RunResult, logged: Mapping[str, float], *, last: int) -> None:
    norm, dice = result.norm, random.Random(f"{result.norm}{result.seed}")
    columns = (*METRICS_COLUMNS, "gradient_norm", "accuracy", *logged)
    rows = []
    for step in (step for step in STEPS if step <= last):
        loss = 0.3 + 2 * math.exp(-step / 80) + dice.gauss(0, 0.02)
        row = {"step": step, "seconds": 0.1 * step, "train_loss": loss, "gradient_norm": loss}
        if step % 50 == 0:
            final = ACCURACY.get(norm, 0.9)
            row |= {"valid_loss": loss + 0.1, "accuracy": final - 0.6 * math.exp(-step / 60)}
            row |= logged
        rows.append(row)
    norms = _norm_rows(norm, dice, last) if norm in ("bn", "pn") else None
    write_run(folder, result, rows, norms, columns)


def _norm_rows(norm: str, dice: random.Random, last: int) -> Iterator[dict[str, object]]:
    for step in range(50, last + 1, 50):
        for depth in range(4):
            tid = 0.004 * (depth + 1) * dice.lognormvariate(0, 0.2)
            mean = {"mean_tid": tid, "mean_distance": 0.1 * tid} if norm == "bn" else {}
            row = {"step": step, "layer": f"blocks.{depth}.norm", "norm": norm}
            row |= {"var_tid": 2.5 * tid, "var_distance": 0.2 * tid, "num_nonfinite_batches": 0}
            yield row | mean
