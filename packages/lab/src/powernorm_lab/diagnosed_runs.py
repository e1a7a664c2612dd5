"""Diagnoses of runs with published statistics, and of all runs of a folder with their scores."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from powernorm.diagnosis import Diagnosis
from powernorm.errors import InputError
from powernorm.inspection.batches import Progress
from powernorm.inspection.devices import Device
from powernorm.inspection.modules import batch_layers
from powernorm.records import CONFIG_FILE
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.engine.folders import find_runs, read_json, read_result
from powernorm_lab.recipes import paper_statistics
from powernorm_lab.report import read_diagnosis, write_diagnosis_page
from powernorm_lab.runs import CHECKPOINTS_FOLDER, DIAGNOSIS_FILE, DIAGNOSIS_PAGE
from powernorm_lab.tasks.run_diagnosis import diagnose_run
from powernorm_lab.tasks.trained_models import load_trained, run_config

OnRun = Callable[[Path, str], None]
"""Function that receives a run and `scored`, or the reason why it was skipped."""
_KEPT: Final = "has its scores"


def with_paper(report: Diagnosis, path: Path) -> Diagnosis:
    """Return a diagnosis with the published statistics of the run's norm.

    Args:
        report: diagnosis of the run.
        path: folder of the run, or one of its checkpoints.
    """
    folder = path if path.is_dir() else path.parent.parent
    settings = read_json(folder / CONFIG_FILE)
    paper = paper_statistics(run_config(settings))
    return replace(report, paper=[one for one in paper if one["norm"] == settings["norm"]])


def comparisons_in(folder: Path) -> list[Path]:
    """Return the folder itself if it has runs, else its direct subfolders with runs, by name."""
    if not folder.is_dir() or (folder / CONFIG_FILE).is_file():
        return []
    if find_runs(folder):
        return [folder]
    return sorted(path for path in folder.iterdir() if find_runs(path))


def score_runs(
    comparisons: list[Path],
    split: EvaluatedSplit,
    *,
    num_batches: int = 50,
    device: Device = "cpu",
    on_run: OnRun | None = None,
    on_scored: Progress | None = None,
) -> None:
    """Diagnose runs and score them with running, re-estimated and batch statistics.

    Each run gets its `diagnosis.json` and `diagnosis.html` as soon as it is scored. Runs whose
    diagnosis has scores of the split and is newer than their weights are skipped, so that the call
    resumes an interrupted one. Runs without batch statistics are skipped, too.

    Args:
        comparisons: folders of comparisons.
        split: split to score.
        num_batches: training batches in each pass.
        device: device of the models.
        on_run: called after every run.
        on_scored: called after every kind of statistics, see `powernorm.diagnose`.

    Raises:
        InputError: a run cannot be read, or none has batch statistics.
    """
    num_scored = 0
    for run in [run for folder in comparisons for run in find_runs(folder)]:
        what = _reason_to_leave(run, split)
        if not what:
            report = diagnose_run(
                run, num_batches=num_batches, device=device, scores=split, on_scored=on_scored
            )
            report = with_paper(report, run)
            report.write_json(run / DIAGNOSIS_FILE)
            write_diagnosis_page(report.to_json(), run / DIAGNOSIS_PAGE)
            what = "scored"
        num_scored += what in ("scored", _KEPT)
        if on_run is not None:
            on_run(run, what)
    if not num_scored:
        names = ", ".join(map(str, comparisons))
        raise InputError(
            f"{names}: no finished run has batch statistics to score: leave out --scores, or train "
            "norms such as bn and rbn"
        )


def _reason_to_leave(run: Path, split: EvaluatedSplit) -> str:
    result = read_result(run)
    if result is None or result.status != "finished":
        return "unfinished" if result is None else result.status
    if not (run / CHECKPOINTS_FOLDER).is_dir():
        return "no weights"
    if _has_scores(run, split):
        return _KEPT
    return "" if batch_layers(load_trained(run).model) else "no batch statistics"


def _has_scores(run: Path, split: EvaluatedSplit) -> bool:
    file = run / DIAGNOSIS_FILE
    if not file.is_file():
        return False
    weights = max(path.stat().st_mtime for path in (run / CHECKPOINTS_FOLDER).iterdir())
    rows = read_diagnosis(file)["evaluation"]
    return file.stat().st_mtime >= weights and any(
        name.startswith(f"{split}_") for row in rows for name in row.get("scores", {})
    )
