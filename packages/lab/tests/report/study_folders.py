"""Study folders like real ones, without training."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.tests.report.synthetic import made_result, write_results, write_run

from powernorm.records import TID
from powernorm_lab.runs import SCALES_FILE, RunResult

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
    runs = [
        _write_run(folder, row, seed, loss, score)
        for row in rows
        for seed, loss in enumerate(row.losses)
    ]
    return write_results(
        folder,
        runs,
        f"test_{score or 'perplexity'}",
        task=task,
        preset="demo",
        settings={"variants": {row.label: f"norm={row.norm}" for row in rows}},
        study={"x_label": "", "logarithmic": False, "source": "A. Paper 2020"} | study,
    )


def _write_run(
    folder: Path, row: Row, seed: int, loss: float | str, score: str | None
) -> RunResult:
    known = loss if isinstance(loss, float) else None
    centered = row.norm in ("bn", "rbn")
    has_statistics = centered or row.norm in ("pn", "pnv")
    share = 0.01 * (known or 3.0)
    mean = share if centered else None
    metrics = {
        f"{split}_{name}": None if known is None else value
        for split in ("valid", "test")
        for name, value in (("loss", known), ("perplexity", math.exp(known or 0.0)))
    }
    if score is not None:
        metrics[f"test_{score}"] = None if known is None else 50 - 10 * known
    result = made_result(
        row.norm,
        seed,
        label=row.label,
        status="finished" if known is not None else loss,
        metrics=metrics,
        tid=TID(mean_last=mean, var_last=share, mean_avg=mean, var_avg=2 * share)
        if has_statistics and known is not None
        else None,
        seconds=1.0,
        tokens_per_second=1000.0,
        parameters=1000,
        x=row.x,
        y=row.y,
        remark=row.remark,
    )
    end = known or 4.0
    curve = [
        {
            "step": step,
            "tokens": 100 * step,
            "train_loss": end + 3 / step,
            "valid_loss": end + 4 / step,
            "valid_perplexity": math.exp(end + 4 / step),
        }
        for step in STEPS
    ]
    norms = [
        {"step": step, "layer": f"layers.{layer}.norm", "norm": row.norm, "var_tid": 0.01 * layer}
        for step in STEPS
        for layer in (1, 2)
    ]
    return write_run(folder, result, curve, norms if has_statistics else [])


def write_scales(run: Path, layers: list[dict[str, Any]]) -> None:
    (run / SCALES_FILE).write_text(json.dumps({"format": 1, "layers": layers}), encoding="utf-8")
