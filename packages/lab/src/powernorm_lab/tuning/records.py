"""Files of a tuning."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.files import check_own, remove, write
from powernorm_lab.engine.folders import (
    check_folder,
    check_same_settings,
    prepare_folder,
    write_json,
)
from powernorm_lab.engine.trials import Limits
from powernorm_lab.report.loading import read_metrics
from powernorm_lab.runs import (
    METRICS_FILE,
    TRIALS_COLUMNS,
    TRIALS_FILE,
    TRIALS_FOLDER,
    TUNING_FILE,
    NormTuning,
    RunResult,
    TuningRecord,
)
from powernorm_lab.schema import read_record
from powernorm_lab.tuning.norm_studies import STORAGE_FILE
from powernorm_lab.tuning.ranges import Point

FORMAT: Final = 1


@dataclass(frozen=True)
class Begun:
    """Contents of tuning.json that a resumed tuning needs."""

    identity: dict[str, Any]
    norms: dict[str, NormTuning]
    round_size: int
    compared: dict[str, int]
    """Number of the trial whose settings the comparison uses, by norm."""


def take_folder(
    out: Path, identity: Mapping[str, Any], *, resume: bool, force: bool
) -> Begun | None:
    """Prepare the folder of a tuning, or refuse it.

    Args:
        out: the folder.
        identity: settings that a resumed tuning must share with the existing one.
        resume: continue an existing tuning.
        force: delete an existing tuning first.

    Returns:
        The record of the resumed tuning; None for a new one.

    Raises:
        InputError: the folder has another tuning, or other runs.
    """
    path = out / TUNING_FILE
    check_own(out / TRIALS_FOLDER, out / STORAGE_FILE)
    if not path.exists():
        check_folder(out, resume=False, force=force)
        prepare_folder(out, resume=False, force=force)
        return None
    if not (resume or force):
        raise InputError(
            f"{out} has a tuning: give another --out, --resume to continue it or --force to delete "
            "it"
        )
    check_folder(out, resume=resume, force=force)
    if force:
        prepare_folder(out, resume=False, force=True)
        remove(*(out / name for name in (TRIALS_FOLDER, STORAGE_FILE, TRIALS_FILE, TUNING_FILE)))
        return None
    record = read_record(Begun, path, "put a copy of it in its place, or restart with --force")
    _check_same_tuning(out, record.identity, identity)
    return record


def _check_same_tuning(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Check that a resumed tuning has the settings of the existing one.

    Raises:
        InputError: the settings differ; the message names the difference.
    """
    before, now = old.get("search", {}), new["search"]
    left_out = [norm for norm in before if norm not in now]
    if left_out:
        raise InputError(
            f"{out} has trials of {', '.join(before)}: name {', '.join(left_out)} among the "
            "norms, too, or give another --out"
        )
    # Ranges of new norms have no counterpart.
    check_same_settings(out, old, {**new, "search": {norm: now[norm] for norm in before}})


def write_record(out: Path, record: TuningRecord, identity: Mapping[str, Any], **own: Any) -> None:
    """Write tuning.json."""
    write_json(out / TUNING_FILE, {"format": FORMAT, **record, "identity": identity, **own})


def write_trials(out: Path, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Write trials.csv, with one row per trial and one column per setting.

    Args:
        out: folder of the tuning.
        rows: values by TRIALS_COLUMNS and key.
        keys: keys of all searched settings.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*TRIALS_COLUMNS, *keys], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(out / TRIALS_FILE, text.getvalue())


def history(folder: Path, column: str) -> Limits:
    """Return the finite values of a column of a run's metrics.csv, by step."""
    rows = read_metrics(folder / METRICS_FILE)
    if column not in rows:
        return {}
    cells = zip(rows["step"], rows[column], strict=True)
    return {int(step): float(value) for step, value in cells if isfinite(step) and isfinite(value)}


def last_step(folder: Path) -> int | None:
    """Return the last step that a run has logged."""
    return max(history(folder, "step"), default=None)


def trial_row(result: RunResult | None, folder: Path, trial: Point, metric: str) -> dict[str, Any]:
    """Return the row of a trial in trials.csv, without its settings."""
    row: dict[str, Any] = {"norm": trial.norm, "trial": trial.number, "folder": folder.name}
    if result is None:
        return {**row, "status": "unfinished"}
    return {
        **row,
        "status": result.status,
        "value": result.metrics.get(metric) if result.status == "finished" else None,
        "step": last_step(folder),
        "seconds": result.seconds,
    }
