"""Study folders like real ones, without training."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.tests.report.synthetic import write_rows

from powernorm.records import NORMS_COLUMNS
from powernorm_lab.runs import (
    METRICS_COLUMNS,
    METRICS_FILE,
    NORMS_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    SCALES_FILE,
    run_name,
)

STEPS = range(10, 110, 10)


@dataclass(frozen=True)
class Row:
    """A variant with its loss by seed; a string is the status of a run without one."""

    label: str
    norm: str
    losses: Sequence[float | str]
    x: float | None = None
    y: float | None = None
    remark: str = ""


def write_study(
    folder: Path,
    study: dict[str, Any],
    rows: Sequence[Row],
    *,
    task: str = "lm",
    score: str | None = None,
) -> Path:
    """Write a study.

    Args:
        folder: folder to write into.
        study: description of the study.
        rows: variants of the study.
        task: name of the task.
        score: score for which higher is better, such as bleu, 50 minus ten times the loss; None
            means perplexity.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = [
        _write_run(folder, row, seed, loss, score)
        for row in rows
        for seed, loss in enumerate(row.losses)
    ]
    results = {
        "format": 2,
        "task": task,
        "preset": "demo",
        "placement": "pre",
        "settings": {"variants": {row.label: f"norm={row.norm}" for row in rows}},
        "data": {},
        "baselines": [],
        "runs": runs,
        "goal": {"metric": "test_perplexity", "direction": "min"},
        "study": {"x_label": "", "logarithmic": False, "source": "A. Paper 2020"} | study,
    }
    if score is not None:
        results["goal"] = {"metric": f"test_{score}", "direction": "max"}
    (folder / RESULTS_FILE).write_text(json.dumps(results), encoding="utf-8")
    return folder


def _write_run(
    folder: Path, row: Row, seed: int, loss: float | str, score: str | None
) -> dict[str, Any]:
    run = folder / run_name(row.label, "pre", seed)
    run.mkdir()
    known = loss if isinstance(loss, float) else None
    centered = row.norm in ("bn", "rbn")
    has_statistics = centered or row.norm in ("pn", "pnv")
    share = 0.01 * (known or 3.0)
    result: dict[str, Any] = {
        "label": row.label,
        "norm": row.norm,
        "seed": seed,
        "placement": "pre",
        "status": "finished" if known is not None else loss,
        "metrics": {
            f"{split}_{name}": None if known is None else value
            for split in ("valid", "test")
            for name, value in (("loss", known), ("perplexity", math.exp(known or 0.0)))
        },
        "tid": {
            "mean_last": share if centered else None,
            "var_last": share,
            "mean_avg": share if centered else None,
            "var_avg": 2 * share,
        }
        if has_statistics and known is not None
        else None,
        "seconds": 1.0,
        "tokens_per_second": 1000.0,
        "parameters": 1000,
        "folder": run.name,
        "x": row.x,
        "y": row.y,
    }
    if score is not None:
        result["metrics"][f"test_{score}"] = None if known is None else 50 - 10 * known
    if row.remark:
        result["remark"] = row.remark
    (run / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")
    end = known or 4.0
    metrics = [
        {
            "step": step,
            "tokens": 100 * step,
            "train_loss": end + 3 / step,
            "valid_loss": end + 4 / step,
            "valid_perplexity": math.exp(end + 4 / step),
        }
        for step in STEPS
    ]
    write_rows(run / METRICS_FILE, METRICS_COLUMNS, metrics)
    norms = [
        {"step": step, "layer": f"layers.{layer}.norm", "norm": row.norm, "var_tid": 0.01 * layer}
        for step in STEPS
        for layer in (1, 2)
    ]
    write_rows(run / NORMS_FILE, NORMS_COLUMNS, norms if has_statistics else [])
    return result


def write_scales(run: Path, layers: list[dict[str, Any]]) -> None:
    (run / SCALES_FILE).write_text(json.dumps({"format": 1, "layers": layers}), encoding="utf-8")
