"""Reading of run folders into a `Comparison`; errors name damaged files and lines."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from io import StringIO
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Final, NotRequired, cast

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series, read_csv, to_numeric
from typing_extensions import TypedDict

from powernorm.errors import InputError
from powernorm.files import read_text
from powernorm.json_reading import parse_json, read_json_object
from powernorm.records import CONFIG_FILE, NORMS_COLUMNS, DiagnosisRecord, LayerMeasures, Placement
from powernorm_lab.report.measures import MAIN, PERPLEXITY, goal_of
from powernorm_lab.report.records import Comparison, ReportedRun, Translation
from powernorm_lab.runs import (
    COMPARISON_FILE,
    DIAGNOSES_FILE,
    DIAGNOSIS_FILE,
    METRICS_COLUMNS,
    METRICS_FILE,
    NORMS_FILE,
    PLACEMENTS,
    RESULT_FILE,
    RESULTS_FILE,
    SCALES_FILE,
    TRANSLATIONS_COLUMNS,
    TRANSLATIONS_FILE,
    TRIALS_COLUMNS,
    TRIALS_FILE,
    TRIALS_FOLDER,
    TUNING_FILE,
    ComparisonHead,
    ComparisonResults,
    FunctionRecord,
    Goal,
    RunResult,
    ScalesRecord,
    is_run_folder,
)
from powernorm_lab.schema import LARGEST, read_record, record_of

_HINT: Final = "restore the file, or delete it and run the comparison again with --resume"
_RUN_NAME: Final = re.compile(
    rf"(?P<norm>.+?)(?:-(?P<placement>{'|'.join(PLACEMENTS)}))?-seed(?P<seed>\d+)"
)


def read_comparison(folder: str | Path) -> Comparison:
    """Read a comparison folder, complete or not.

    Runs are those of `results.json` in its order, followed by other run folders. A comparison in
    progress or without `results.json` can therefore be read, too: the rest is then taken from
    `comparison.json`, or else from the runs.

    Raises:
        InputError: `folder` has no run, or a damaged file; the message names file and line.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected the --out folder of a comparison")
    head = _listed(folder)
    results = [*head.runs] if isinstance(head, ComparisonResults) else []
    known = {result.folder for result in results}
    found = [
        _read_run(path)
        for path in sorted(folder.iterdir())
        if path.name not in known and is_run_folder(path)
    ]
    results += _in_order(found, head.settings.get("norms") if head else None)
    if head is None and not results:
        raise InputError(_no_runs_message(folder))
    return _comparison(folder, head, results)


def read_runs(parent: Path, names: Sequence[str]) -> Comparison:
    """Read some runs of a folder, with the settings of their comparison if there is one.

    Args:
        parent: folder of the runs.
        names: names of the runs' folders.

    Raises:
        InputError: a run or the comparison's `results.json` is damaged.
    """
    return _comparison(parent, _listed(parent), [_read_run(parent / name) for name in names])


def _comparison(
    folder: Path, head: ComparisonHead | None, results: Sequence[RunResult]
) -> Comparison:
    baselines = head.baselines if isinstance(head, ComparisonResults) else []
    floor = baselines[0]["metrics"].get("valid_loss") if baselines else None
    runs = [_with_logs(folder, result, floor) for result in results]
    if head is None:
        return _cleaned(_headless(folder, runs))
    comparison = Comparison(**{**vars(head), "folder": folder, "runs": runs})
    if comparison.changes and not comparison.changes["settings"]:
        comparison = replace(comparison, changes=None)
    return _cleaned(comparison)


def _in_order(runs: list[RunResult], norms: object) -> list[RunResult]:
    """Sort runs by the order of norms, if known, and by seed."""
    if not isinstance(norms, list):
        return runs
    return sorted(
        runs,
        key=lambda run: (norms.index(run.norm) if run.norm in norms else len(norms), run.seed),
    )


def _listed(folder: Path) -> ComparisonHead | None:
    """Read `results.json`, or else `comparison.json`, which lists no runs."""
    kinds = {RESULTS_FILE: ComparisonResults, COMPARISON_FILE: ComparisonHead}
    for name, kind in kinds.items():
        if (folder / name).exists():
            return read_record(kind, folder / name, _HINT)
    return None


def _cleaned(comparison: Comparison) -> Comparison:
    """Remove non-finite metrics of a user's function except for the goal.

    A non-finite goal means a failed run. Other metrics may have no value, such as a precision
    without any findings.
    """
    if comparison.function is None:
        return comparison
    runs = [
        replace(
            run,
            metrics={
                name: value
                if name == comparison.metric or value is None or isfinite(value)
                else None
                for name, value in run.metrics.items()
            },
        )
        for run in comparison.runs
    ]
    return replace(comparison, runs=runs)


def _no_runs_message(folder: Path) -> str:
    if (folder / TUNING_FILE).exists():
        return (
            f"{folder} is a tuning with unfinished trials: continue with `powernorm tune … "
            f"--resume`; the trials so far: powernorm report {folder / TRIALS_FOLDER}"
        )
    message = f"{folder} has neither {RESULTS_FILE} nor run folders; expected the --out folder "
    if is_run_folder(folder):
        return f"{folder} is a single run; give the comparison's folder, {folder.resolve().parent}"
    return message + "of `powernorm compare`"


def _headless(folder: Path, runs: list[ReportedRun]) -> Comparison:
    """Return a comparison without `results.json` from the settings of a run."""
    settings: dict[str, Any] = {}
    whose = ""
    for run in runs:
        path = folder / run.folder / CONFIG_FILE
        if path.exists():
            settings, whose = read_json_object(path, f"remove {path.parent}"), run.folder
            break
    own = record_of(
        _OwnSettings, settings, f"{folder / whose / CONFIG_FILE}", f"remove {folder / whose}"
    )
    return Comparison(
        format=2,
        folder=folder,
        study=next((run.study for run in runs if run.study is not None), None),
        settings_of=whose,
        goal=own.get("goal") or _goal(own, runs),
        function=own.get("function"),
        task=str(settings.get("task", folder.name)),
        preset=str(settings.get("preset", "")),
        placement=runs[0].placement,
        settings=settings,
        runs=runs,
    )


class _OwnSettings(TypedDict):
    """Optional settings of a run that describe its comparison."""

    goal: NotRequired[Goal]
    function: NotRequired[FunctionRecord | None]


def _goal(own: _OwnSettings, runs: Sequence[ReportedRun]) -> Goal:
    """Return the goal of a comparison that has none, from the metrics of its runs."""
    if own.get("function") is not None:
        # The better direction of a user's metric is not known.
        return Goal(metric="valid_loss", direction="min")
    found = {metric for run in runs for metric in run.metrics}
    return goal_of(next((metric for metric in MAIN if metric in found), PERPLEXITY))


def _read_run(folder: Path) -> RunResult:
    path = folder / RESULT_FILE
    if path.exists():
        return replace(read_record(RunResult, path, f"remove {folder}"), folder=folder.name)
    match = _RUN_NAME.fullmatch(folder.name)
    if match is None:
        raise InputError(
            f"{folder} has no {RESULT_FILE} and its name is not NORM-PLACEMENT-seedN or "
            "NORM-seedN, so that its norm is not known: rename it, or move it out of the "
            "comparison's folder"
        )
    config = folder / CONFIG_FILE
    written = read_json_object(config, f"remove {folder}") if config.exists() else {}
    return RunResult.empty(
        norm=str(written.get("norm", match["norm"].replace("+", ":"))),
        label=str(written.get("label", "")),
        placement=cast("Placement | None", match["placement"]),
        seed=int(match["seed"]),
        status="unfinished",
        folder=folder.name,
    )


def _with_logs(comparison: Path, result: RunResult, floor: float | None) -> ReportedRun:
    folder = comparison / result.folder
    if not folder.resolve().is_relative_to(comparison.resolve()):
        raise InputError(
            f"{comparison / RESULTS_FILE}: the run folder {result.folder!r} lies outside; {_HINT}"
        )
    diagnosis, scales = folder / DIAGNOSIS_FILE, folder / SCALES_FILE
    x, y = (None if at is None or not isfinite(at) else at for at in (result.x, result.y))
    curve = read_metrics(folder / METRICS_FILE)
    return ReportedRun(
        **{**vars(result), "x": x, "y": y},
        curve=curve,
        is_behind=result.status == "diverged" and _is_behind(result, curve, floor),
        samples=read_norms(folder / NORMS_FILE),
        diagnosis=read_diagnosis(diagnosis) if diagnosis.exists() else None,
        diagnoses=read_diagnoses(folder / DIAGNOSES_FILE),
        scales=read_record(ScalesRecord, scales, _HINT)["layers"] if scales.exists() else [],
    )


def _is_behind(result: RunResult, curve: DataFrame, floor: float | None) -> bool:
    """Return whether a diverged run was completed and is only worse than a baseline.

    For a user's function, the engine's message says so. For a built-in task, the valid loss never
    reached the unigram's and ended no higher than it began.
    """
    if " is worse than that of " in (result.message or ""):
        return True
    losses = curve["valid_loss"].dropna().tolist()
    return bool(losses) and floor is not None and floor < min(losses) <= losses[-1] <= losses[0]


def read_selection(folders: Sequence[Path]) -> list[Comparison]:
    """Read comparisons and runs; runs are grouped by their parent folder.

    Raises:
        InputError: no folder is given, or one is neither a comparison nor a run, or is damaged.
    """
    if not folders:
        raise InputError("no folder is given; expected comparisons or runs of `powernorm compare`")
    groups: dict[Path, list[str] | None] = {}
    for folder in folders:
        place = folder.resolve()
        if not is_run_folder(place) or is_comparison(place):
            groups[folder if len(folders) == 1 else place] = None
            continue
        names = groups.setdefault(place.parent, [])
        # A comparison that is shown as a whole already contains its runs.
        if names is not None and place.name not in names:
            names.append(place.name)
    return [
        read_comparison(folder) if names is None else read_runs(folder, names)
        for folder, names in groups.items()
    ]


def is_comparison(folder: Path) -> bool:
    """Return whether a folder has the files of a comparison."""
    return any((folder / name).exists() for name in (RESULTS_FILE, COMPARISON_FILE))


def read_translations(folder: Path) -> list[Translation]:
    """Read the `translations.tsv` of a run, with or without a header; empty without the file.

    Raises:
        InputError: the file cannot be read, or a line does not have three columns.
    """
    path = folder / TRANSLATIONS_FILE
    found = []
    for number, line in enumerate(_complete_text(path).split("\n")[:-1], start=1):
        cells = line.removesuffix("\r").split("\t")
        if number == 1 and tuple(cells) == TRANSLATIONS_COLUMNS:
            continue
        if len(cells) != len(TRANSLATIONS_COLUMNS):
            raise InputError(
                f"{path}, line {number}: {len(cells)} columns, expected "
                f"{', '.join(TRANSLATIONS_COLUMNS)} with "
                "tabs between; repair or remove the line"
            )
        source, reference, translation = cells
        found.append((source, reference, translation))
    return found


def _complete_text(path: Path) -> str:
    """Return the text of a log; empty without the file."""
    text = read_text(path) if path.exists() else ""
    # A last line without a line end is still being written, or its writer was killed.
    return text[: text.rfind("\n") + 1]


# Diagnoses.


_LINE_HINT: Final = "repair or remove the line"
_DIAGNOSIS_HINT: Final = "restore the file, or delete it and run `powernorm diagnose` again"


def read_diagnosis(path: Path) -> DiagnosisRecord:
    """Read a diagnosis from a file.

    Raises:
        InputError: the file is damaged, or a newer version of powernorm wrote it.
    """
    return _diagnosis(read_json_object(path, _DIAGNOSIS_HINT), str(path), _DIAGNOSIS_HINT)


def read_diagnoses(path: Path) -> list[DiagnosisRecord]:
    """Read a `diagnoses.jsonl`; return an empty list if the file does not exist.

    Raises:
        InputError: a line is damaged, or a newer version of powernorm wrote it; the message names
            file and line.
    """
    return [
        _diagnosis(
            parse_json(line, str(path), _LINE_HINT, line=number),
            f"{path}, line {number}",
            _LINE_HINT,
        )
        for number, line in enumerate(_complete_text(path).split("\n")[:-1], start=1)
    ]


_NUMBER: Any = float | None
_MEASURES: Any = {
    one.name: _NUMBER if one.default is MISSING else NotRequired[_NUMBER]
    for one in fields(LayerMeasures)
}
_TEXTS: Any = {"layer": str, "norm": str, "verdict": str | None, "reason": str | None}
_LayerRow: Any = TypedDict("_LayerRow", _TEXTS | _MEASURES)  # type: ignore[misc]


def _diagnosis(values: object, place: str, hint: str) -> DiagnosisRecord:
    diagnosis = record_of(DiagnosisRecord, values, place, hint)
    for index, row in enumerate(diagnosis["layers"]):
        # Add missing columns, and keep additional ones.
        row |= record_of(_LayerRow, row, place, hint, ("layers", index))
        row |= {column: row[column] or "" for column in ("verdict", "reason")}
    for index, scale in enumerate(diagnosis["scales"]):
        weights, deviations = len(scale["weight"]), len(scale["deviation"])
        if weights != deviations:
            raise InputError(
                f"{place}: scales[{index}].weight has {weights} values, deviation {deviations}; "
                f"{hint}"
            )
    return diagnosis


# The CSV logs of a run.


_FIRST_METRICS_COLUMNS: Final = METRICS_COLUMNS[: METRICS_COLUMNS.index("valid_perplexity") + 1]
_FIRST_NORMS_COLUMNS: Final = NORMS_COLUMNS[: NORMS_COLUMNS.index("num_nonfinite_batches") + 1]
"""Columns of the first version; later columns are empty for a file without them."""

_Rule = tuple[Callable[[NDArray[np.float64]], Any], str]
_FINITE: Final[_Rule] = (lambda values: ~np.isinf(values), "expected a finite number")
_WHOLE: Final[_Rule] = (
    lambda values: np.isfinite(values) & (np.trunc(values) == values),
    "not a whole number",
)
_COUNT: Final[_Rule] = (lambda values: np.isnan(values) | _WHOLE[0](values), _WHOLE[1])


def read_metrics(path: Path) -> DataFrame:
    """Read a `metrics.csv`: METRICS_COLUMNS, then the run's own columns, one row per line.

    An empty cell is NaN; a number that is not finite or too large is infinite. The table is empty
    if the file does not exist.

    Raises:
        InputError: a line is damaged; the message names file and line.
    """
    rules = {"step": _FINITE, "tokens": _FINITE}
    return _read_log(path, _FIRST_METRICS_COLUMNS, METRICS_COLUMNS, rules)


def read_norms(path: Path) -> DataFrame:
    """Read a `norms.csv`: one row per layer and monitored step, with cells as in `read_metrics`.

    Raises:
        InputError: a line is damaged; the message names file and line.
    """
    rules = {"step": _WHOLE, "num_nonfinite_batches": _COUNT}
    return _read_log(path, _FIRST_NORMS_COLUMNS, NORMS_COLUMNS, rules, texts=("layer", "norm"))


def _read_log(
    path: Path,
    first: Sequence[str],
    known: Sequence[str],
    rules: Mapping[str, _Rule],
    texts: Sequence[str] = (),
) -> DataFrame:
    header, rows, lines = list(first), [], []
    reader = csv.reader(_complete_text(path).splitlines(keepends=True), strict=True)
    try:
        header = next(reader, header)
        missing = [column for column in first if column not in header]
        if missing:
            raise InputError(
                f"{path}, line 1: the header lacks {', '.join(missing)}; expected {','.join(first)}"
            )
        for cells in reader:
            if len(cells) != len(header):
                raise InputError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, expected {len(header)}; "
                    "repair or remove the line"
                )
            rows.append(cells)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    table: dict[str, Any] = dict.fromkeys([*known, *header], nan)
    for index, column in enumerate(header):
        table[column] = words = [cells[index] for cells in rows]
        if column in texts:
            continue
        table[column] = found = _leading_numbers(words)
        is_valid, expected = rules.get(column, (np.isreal, ""))
        wrong = [*np.flatnonzero(~is_valid(found))]
        if len(found) < len(rows):
            wrong, expected = [len(found)], "expected a number or nothing"
        if wrong:
            raise InputError(
                f"{path}, line {lines[wrong[0]]}: {column} is {words[wrong[0]]!r}, {expected}; "
                "repair or remove the line"
            )
    return DataFrame(table, index=range(len(rows)))


def _leading_numbers(cells: Sequence[str]) -> NDArray[np.float64]:
    """Return the numbers before the first cell that is not one, with NaN for empty cells only."""
    numbers: list[float] = []
    with suppress(ValueError):
        # Not cell by cell: 500 runs have millions of them.
        numbers.extend(map(float, [cell or "nan" for cell in cells]))
    values = np.array(numbers, dtype=float)
    is_text = np.array([cell != "" for cell in cells[: len(values)]], dtype=bool)
    values[np.isnan(values) & is_text] = inf
    return np.where(np.abs(values) > LARGEST, np.copysign(inf, values), values)


# Trials of a tuning.


def read_trials(folder: Path) -> DataFrame:
    """Read the finished trials of a `trials.csv`; empty for a missing or foreign file.

    Raises:
        InputError: the file is not UTF-8 or cannot be read.
    """
    text = _complete_text(folder / TRIALS_FILE)
    header = text.partition("\n")[0].rstrip("\r").split(",")
    if not set(TRIALS_COLUMNS) <= set(header):
        return DataFrame(columns=TRIALS_COLUMNS)
    table = read_csv(StringIO(text), dtype=str, keep_default_na=False, on_bad_lines="skip")
    table["value"] = numbers(table["value"])
    return table.dropna(subset="value")


def numbers(texts: Series) -> Series:
    """Convert a column to numbers, with NaN for every other text."""
    numbers = to_numeric(texts, errors="coerce")
    return numbers.where(np.isfinite(numbers))
