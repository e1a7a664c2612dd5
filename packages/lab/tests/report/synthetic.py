"""Writer of comparison folders without training; a language model, 5 norms × 2 seeds, some lost."""

import csv
import json
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from powernorm.records import NORMS_COLUMNS, TID
from powernorm_lab.report import print_comparison, read_comparison
from powernorm_lab.report.measures import goal_of
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.runs import (
    METRICS_COLUMNS,
    METRICS_FILE,
    NORMS_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    Baseline,
    ComparisonResults,
    RunResult,
    run_name,
)
from powernorm_lab.schema import written

NORMS = ("ln", "bn", "rbn", "pn", "adanorm")
SEEDS = (0, 1)
LAYERS = (
    *(f"model.blocks.{block}.{part}_norm" for block in range(3) for part in ("attention", "feed")),
    "model.final_norm",
)
HAS_STATISTICS = {"bn": True, "rbn": True, "pn": False}
"""Whether norms with batch statistics center."""
HAS_GRADIENTS = (*HAS_STATISTICS, "ln")
"""Norms whose input gradients are logged; norms without statistics log nothing else."""

PERPLEXITY = {"ln": 100.0, "bn": 130.0, "rbn": 112.0, "pn": 104.0, "adanorm": 98.0}
STEPS = range(10, 1010, 10)
TOKENS_A_STEP = 2048


PAPER = [
    {
        "norm": norm,
        "placement": "pre",
        "dataset": "Penn Treebank",
        "metric": "test_perplexity",
        "value": value,
        "source": "Shen et al. 2020, Table 2",
    }
    for norm, value in (("ln", 53.2), ("rbn", 47.6), ("pnv", 55.3))
]
"""Published results for a comparison."""


def status_of(norm: str, seed: int) -> str:
    """Return the status of a run; a seed of bn diverged and one of pn became NaN."""
    return {("bn", 1): "diverged", ("pn", 1): "nonfinite"}.get((norm, seed), "finished")


def made_run(norm: str, seed: int = 0, **changes: Any) -> ReportedRun:
    """Return a finished run without numbers, except for the changes."""
    return ReportedRun(**vars(made_result(norm, seed)) | changes)


def made_result(norm: str, seed: int = 0, **changes: Any) -> RunResult:
    """Return the result of a finished run without numbers, except for the changes."""
    given: dict[str, Any] = {"placement": "pre", "status": "finished", "metrics": {}, "tid": None}
    given |= {"seconds": 0.0, "tokens_per_second": None, "parameters": None} | changes
    name = run_name(given.get("label") or norm, given["placement"], seed)
    return RunResult(norm=norm, seed=seed, folder=name, **given)


def made_comparison(runs: list[ReportedRun], metric: str, **changes: Any) -> Comparison:
    """Return a comparison of a built-in task with a main metric."""
    given = {"format": 2, "task": "classify", "preset": "rt", "placement": "pre", "settings": {}}
    return Comparison(folder=Path("runs"), runs=runs, goal=goal_of(metric), **given | changes)


Rows = Iterable[Mapping[str, object]]


def write_run(
    folder: Path,
    result: RunResult,
    metrics: Rows,
    norms: Rows | None = None,
    columns: Sequence[str] = METRICS_COLUMNS,
) -> RunResult:
    """Write a run's logs and result into its folder; return the result."""
    run = folder / result.folder
    run.mkdir(parents=True)
    write_rows(run / METRICS_FILE, columns, metrics)
    if norms is not None:
        write_rows(run / NORMS_FILE, NORMS_COLUMNS, norms)
    save(run / RESULT_FILE, result)
    return result


def write_results(folder: Path, runs: Sequence[RunResult], metric: str, **head: Any) -> Path:
    """Write the `results.json` of a built-in task with a main metric; return `folder`."""
    given = {"format": 2, "placement": "pre", "goal": goal_of(metric)}
    save(folder / RESULTS_FILE, ComparisonResults(runs=runs, **given | head))
    return folder


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of a JSON file, and write them with their changes."""
    contents = json.loads(path.read_text(encoding="utf-8"))
    yield contents
    path.write_text(json.dumps(contents), encoding="utf-8")


def save(path: Path, record: object) -> None:
    """Write a record as the engine does."""
    path.write_text(json.dumps(written(record)), encoding="utf-8")


def write_comparison(
    folder: Path,
    *,
    norms: tuple[str, ...] = NORMS,
    seeds: tuple[int, ...] = SEEDS,
    extra_settings: dict[str, Any] | None = None,
    **head: Any,
) -> Path:
    """Write `results.json` with values of `head`, and the run folders; return `folder`."""
    settings = {
        "task": "lm",
        "preset": "demo",
        "norms": list(norms),
        "seeds": list(seeds),
        "model": {"num_features": 128, "num_layers": 3, "placement": "pre"},
        "norm_options": {"rbn": {"mean_penalty": 0.01}, "pn": {}},
        "versions": {"python": "3.11.9", "torch": "2.13.0", "powernorm": "0.1.0"},
        "machine": {"processor": "x86_64 <two cores>", "threads": 2},
    }
    return write_results(
        folder,
        [_write_run(folder, norm, seed) for norm in norms for seed in seeds],
        "test_perplexity",
        task="lm",
        preset="demo",
        settings=settings | (extra_settings or {}),
        data={
            "name": "lm_sotu",
            "source": 'State of the Union addresses & "messages" <1790-2021>',
            "licence": "CC0",
            "words": {"train": 1_600_000, "valid": 90_000, "test": 90_000},
        },
        baselines=[_baseline("unigram", 900.0), _baseline("bigram", 240.0)],
        **head,
    )


def _baseline(name: str, perplexity: float) -> Baseline:
    metrics = {"valid_perplexity": perplexity, "test_perplexity": perplexity + 10}
    return Baseline(name=name, metrics=metrics)


def _write_run(folder: Path, norm: str, seed: int) -> RunResult:
    status, dice = status_of(norm, seed), random.Random(f"{norm}{seed}")
    last = {"finished": 1000, "diverged": 700, "nonfinite": 430}[status]
    finished, has_tid = status == "finished", norm in HAS_STATISTICS
    known = {"diverged": 5000.0, "nonfinite": None}.get(status, PERPLEXITY[norm] + 2 * seed)
    loss = None if known is None else math.log(known)
    result = made_result(
        norm,
        seed,
        status=status,
        metrics={
            f"{split}_{name}": value
            for name, value in (("perplexity", known), ("loss", loss))
            for split in ("valid", "test")
        },
        tid=made_tid(centered=HAS_STATISTICS[norm]) if has_tid and finished else None,
        seconds=48.0 + seed,
        tokens_per_second=42_000.0 + 500 * seed,
        parameters=1_234_567,
        message="" if finished else f"stopped: {status} <b>here</b>",
    )
    metrics = _metric_rows(norm, seed, status, last, dice)
    norms = _norm_rows(norm, last, dice, lost=not finished) if norm in HAS_GRADIENTS else None
    return write_run(folder, result, metrics, norms)


def made_tid(share: float = 0.01, *, centered: bool) -> TID:
    """Return a TID of mean and deviation, or of the deviation alone."""
    mean = share if centered else None
    return TID(
        mean_last=None if mean is None else 2 * mean,
        var_last=5 * share,
        mean_avg=mean,
        var_avg=2.5 * share,
    )


def _metric_rows(
    norm: str, seed: int, status: str, last: int, dice: random.Random
) -> list[dict[str, object]]:
    floor = math.log(PERPLEXITY[norm] + 2 * seed) - 0.6
    rows: list[dict[str, object]] = []
    for step in STEPS:
        if step > last:
            break
        loss = floor + 3.6 * math.exp(-step / 180) + dice.gauss(0, 0.03)
        if status == "diverged" and step > 500:
            loss += (step - 500) / 40
        if status == "nonfinite" and step == last:
            loss = math.nan
        row: dict[str, object] = {
            "step": step,
            "epoch": step // 400,
            "tokens": step * TOKENS_A_STEP,
            "seconds": step * 0.048,
            "learning_rate": 1e-3 * min(1.0, step / 100),
            "train_loss": loss,
        }
        if step % 100 == 0:
            row |= {"valid_loss": loss + 0.1, "valid_perplexity": math.exp(min(loss + 0.7, 20))}
            if norm in HAS_STATISTICS:
                row |= {"gap_running_loss": loss + 0.12, "gap_batch_loss": loss + 0.1 - 10 / step}
        rows.append(row)
    return rows


def _norm_rows(norm: str, last: int, dice: random.Random, *, lost: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for step in STEPS:
        if step > last:
            break
        for depth, layer in enumerate(LAYERS):
            tid = (
                0.004 * (depth + 1) * (1 + 3 * math.exp(-step / 100)) * dice.lognormvariate(0, 0.2)
            )
            broken = lost and step >= last - 20 and depth >= 4
            row: dict[str, object] = {"step": step, "layer": layer, "norm": norm}
            if norm in HAS_STATISTICS:
                row |= _statistics(tid, centered=HAS_STATISTICS[norm], broken=broken)
            row |= {
                "gradient_norm": 0.01 + tid,
                "mean_gradient_norm": 0.1 * tid if HAS_STATISTICS.get(norm) else "",
                "var_gradient_norm": 0.3 * tid if norm in HAS_STATISTICS else "",
                "token_gradient_mean": -1e-9,
                "token_gradient_var": 1e-6 * (depth + 1),
                "nonfinite_input": 1 if broken else 0,
                "nonfinite_gradient": 0,
                "first_nonfinite": 1 if lost and step == last - 20 and depth == 4 else 0,
            }
            rows.append(row)
    return rows


def _statistics(tid: float, *, centered: bool, broken: bool) -> dict[str, object]:
    return {
        "mean_tid": (math.nan if broken else tid) if centered else "",
        "var_tid": math.nan if broken else 2.5 * tid,
        "mean_distance": 0.1 * tid if centered else "",
        "var_distance": 0.2 * tid,
        "num_nonfinite_batches": 3 if broken else 0,
    }


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a log in the format of runs, with empty cells for missing values."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def printed(
    shown: Path | Comparison,
    width: int,
    *,
    terminal: bool = True,
    asked: bool = False,
    wide: bool = False,
) -> str:
    """Return the output for a comparison in a terminal of this width.

    `asked` sets `COLUMNS` to this width, which also affects a file or a pipe.
    """
    stream = StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, color_system=None)
    with mock.patch.dict(os.environ):
        os.environ.pop("COLUMNS", None)
        if asked:
            os.environ["COLUMNS"] = str(width)
        comparison = read_comparison(shown) if isinstance(shown, Path) else shown
        print_comparison(console, comparison, wide=wide)
    return stream.getvalue()
