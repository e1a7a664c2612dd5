"""From a comparison folder to a `Comparison`; every damaged file is named with its place."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from powernorm.errors import InputError
from powernorm.report.logs import read_metrics, read_norms, read_text
from powernorm.report.records import KNOWN_STATUSES, BaselineRow, Comparison, Run
from powernorm.runs import (
    CONFIG_FILE,
    METRICS_FILE,
    NORMS_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    TID,
    Status,
)

_FORMAT: Final = 1
_MEND: Final = "restore the file, or delete it and run the comparison again with --resume"
_RUN_NAME: Final = re.compile(r"(?P<norm>.+)-(?P<placement>pre|post)-seed(?P<seed>\d+)")


def read_comparison(folder: Path) -> Comparison:
    """Reads a comparison folder, complete or not.

    Runs come from `results.json` in its order; run folders that it does not list yet follow, so a
    comparison that is still going, or lost its `results.json`, can be read too.

    Raises:
        InputError: `folder` holds no run, or a file in it is damaged (file and line are named).
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected the --out folder of a comparison")
    listed = _read_results(folder / RESULTS_FILE)
    runs = [_with_logs(folder, run) for run in listed.runs] if listed else []
    known = {run.folder for run in runs}
    runs += [
        _with_logs(folder, _read_run(path))
        for path in sorted(folder.iterdir())
        if path.name not in known and _is_run_folder(path)
    ]
    if listed is None and not runs:
        raise InputError(_no_runs_message(folder))
    return replace(listed or _headless(folder, runs), folder=folder, runs=runs)


def _no_runs_message(folder: Path) -> str:
    message = f"{folder} holds neither {RESULTS_FILE} nor run folders; expected the --out folder "
    if _is_run_folder(folder):
        return f"{folder} is a single run; give the comparison's folder, {folder.resolve().parent}"
    return message + "of `powernorm compare`"


def _is_run_folder(path: Path) -> bool:
    return path.is_dir() and ((path / RESULT_FILE).exists() or (path / CONFIG_FILE).exists())


def _headless(folder: Path, runs: list[Run]) -> Comparison:
    """What is known of a comparison without `results.json`: one run's settings."""
    settings: Mapping[str, Any] = {}
    for run in runs:
        path = folder / run.folder / CONFIG_FILE
        if path.exists():
            settings = _read_object(path)
            break
    return Comparison(
        folder=folder,
        task=str(settings.get("task", folder.name)),
        preset=str(settings.get("preset", "")),
        placement=runs[0].placement,
        settings=settings,
        data={},
        baselines=(),
        runs=runs,
    )


def _read_results(path: Path) -> Comparison | None:
    if not path.exists():
        return None
    results = _read_object(path)
    if results.get("format") != _FORMAT:
        raise InputError(
            f"{path}: format is {results.get('format')!r}, this version reads {_FORMAT}; "
            "rebuild the report with the version of powernorm that wrote the comparison"
        )
    return Comparison(
        folder=path.parent,
        task=_field(path, results, "task", str),
        preset=_field(path, results, "preset", str),
        placement=_field(path, results, "placement", str),
        settings=_field(path, results, "settings", dict),
        data=_field(path, results, "data", dict),
        baselines=[
            BaselineRow(_field(path, row, "name", str), _metrics(path, row))
            for row in _field(path, results, "baselines", list)
        ],
        runs=[_run(path, row) for row in _field(path, results, "runs", list)],
    )


def _read_run(folder: Path) -> Run:
    path = folder / RESULT_FILE
    if path.exists():
        return replace(_run(path, _read_object(path)), folder=folder.name)
    match = _RUN_NAME.fullmatch(folder.name)
    if match is None:
        raise InputError(
            f"{folder} has no {RESULT_FILE} and its name is not NORM-PLACEMENT-seedN; "
            "move it out of the comparison's folder"
        )
    return Run(
        norm=match["norm"],
        placement=match["placement"],
        seed=int(match["seed"]),
        status="unfinished",
        folder=folder.name,
    )


def _with_logs(comparison: Path, run: Run) -> Run:
    folder = comparison / run.folder
    if not folder.resolve().is_relative_to(comparison.resolve()):
        raise InputError(
            f"{comparison / RESULTS_FILE}: the run folder {run.folder!r} lies outside; {_MEND}"
        )
    return replace(
        run, curve=read_metrics(folder / METRICS_FILE), samples=read_norms(folder / NORMS_FILE)
    )


def _run(path: Path, row: object) -> Run:
    status = _field(path, row, "status", str)
    if status not in KNOWN_STATUSES:
        raise InputError(
            f"{path}: status is {status!r}, expected one of {', '.join(KNOWN_STATUSES)}; {_MEND}"
        )
    return Run(
        norm=_field(path, row, "norm", str),
        placement=_field(path, row, "placement", str),
        seed=_field(path, row, "seed", int),
        status=cast(Status, status),
        folder=_field(path, row, "folder", str),
        metrics=_metrics(path, row),
        tid=_tid(path, row),
        seconds=_number(path, row, "seconds"),
        tokens_per_second=_number(path, row, "tokens_per_second"),
        parameters=_field(path, row, "parameters", int),
        message=str(cast(dict[str, Any], row).get("message", "")),
    )


def _metrics(path: Path, row: object) -> dict[str, float | None]:
    metrics = _field(path, row, "metrics", dict)
    return {str(name): _number(path, metrics, name) for name in metrics}


def _tid(path: Path, row: object) -> TID | None:
    tid = cast(dict[str, Any], row).get("tid")
    if tid is None:
        return None
    return TID(
        mean_last=_number(path, tid, "mean_last"),
        var_last=_nan_if_none(_number(path, tid, "var_last")),
        mean_avg=_number(path, tid, "mean_avg"),
        var_avg=_nan_if_none(_number(path, tid, "var_avg")),
    )


def _nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value


def _number(path: Path, row: object, key: str) -> float | None:
    value = _value(path, row, key)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else float(value)
    raise InputError(f"{path}: {key} is {value!r}, expected a number or null; {_MEND}")


def _field(path: Path, row: object, key: str, kind: type) -> Any:
    value = _value(path, row, key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{path}: {key} is {value!r}, expected {_WORDS[kind]}; {_MEND}")
    return value


_WORDS: Final[Mapping[type, str]] = {
    str: "a string",
    int: "a whole number",
    dict: "an object",
    list: "a list",
}


def _value(path: Path, row: object, key: str) -> object:
    if not isinstance(row, dict):
        raise InputError(f"{path}: found {row!r} where an object with {key!r} belongs; {_MEND}")
    if key not in row:
        raise InputError(f"{path}: {key!r} is missing; {_MEND}")
    return row[key]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: not JSON ({error.msg}); {_MEND}") from error
    except RecursionError:
        raise InputError(f"{path}: nested too deeply to be a file of powernorm; {_MEND}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds {type(value).__name__}, expected an object; {_MEND}")
    return value
