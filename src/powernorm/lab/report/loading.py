"""From a comparison folder to a `Comparison`; every damaged file is named with its place."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Final, Literal, cast, get_args

from powernorm.errors import InputError
from powernorm.lab.report.diagnoses import paper_statistics, read_diagnoses, read_diagnosis
from powernorm.lab.report.json_files import JsonObject, read_object
from powernorm.lab.report.logs import read_metrics, read_norms
from powernorm.lab.report.measures import MAIN, PERPLEXITY, goal_of
from powernorm.lab.report.records import KNOWN_STATUSES, BaselineRow, Comparison, Run
from powernorm.lab.report.tuning_files import read_tuning
from powernorm.runs import (
    COMPARISON_FILE,
    CONFIG_FILE,
    DIAGNOSES_FILE,
    DIAGNOSIS_FILE,
    METRICS_FILE,
    MODEL_FILE,
    NORMS_FILE,
    PLACEMENTS,
    RESULT_FILE,
    RESULTS_FILE,
    SCALES_FILE,
    TID,
    TRIALS_FOLDER,
    TUNING_FILE,
    ChangeRecord,
    ChangesRecord,
    DropRecord,
    FunctionRecord,
    Goal,
    PaperRecord,
    Placement,
    RaceOutcome,
    RaceRecord,
    RaceSettings,
    ScaleRecord,
    Status,
    StudyInfo,
)

_FORMAT: Final = 2
_SCALES_FORMAT: Final = 1
_MEND: Final = "restore the file, or delete it and run the comparison again with --resume"
_RUN_NAME: Final = re.compile(
    rf"(?P<norm>.+?)(?:-(?P<placement>{'|'.join(PLACEMENTS)}))?-seed(?P<seed>\d+)"
)


def read_comparison(folder: Path) -> Comparison:
    """Reads a comparison folder, complete or not.

    Runs come from `results.json` in its order; run folders that it does not list yet follow, so a
    comparison that is still going, or lost its `results.json`, can be read too. What is compared
    then says `comparison.json`, and without that what the runs say of themselves.

    Raises:
        InputError: `folder` holds no run, or a file in it is damaged (file and line are named).
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected the --out folder of a comparison")
    listed = _listed(folder)
    runs = [_with_logs(folder, run) for run in listed.runs] if listed else []
    known = {run.folder for run in runs}
    found = [
        _with_logs(folder, _read_run(path))
        for path in sorted(folder.iterdir())
        if path.name not in known and is_run_folder(path)
    ]
    runs += _in_order(found, listed.settings.get("norms") if listed else None)
    if listed is None and not runs:
        raise InputError(_no_runs_message(folder))
    return _cleaned(replace(listed or _headless(folder, runs), folder=folder, runs=runs))


def read_runs(parent: Path, names: Sequence[str]) -> Comparison:
    """Reads some of the runs of one folder, with the settings of their comparison if there is one.

    Args:
        parent: the folder that holds the runs.
        names: of the runs' folders.

    Raises:
        InputError: a run or the comparison's `results.json` is damaged.
    """
    runs = [_with_logs(parent, _read_run(parent / name)) for name in names]
    return _cleaned(replace(_listed(parent) or _headless(parent, runs), folder=parent, runs=runs))


def _in_order(runs: list[Run], norms: object) -> list[Run]:
    """By norm as they were asked for, and seed; as they lie where that is not known."""
    if not isinstance(norms, list):
        return runs
    return sorted(
        runs,
        key=lambda run: (norms.index(run.norm) if run.norm in norms else len(norms), run.seed),
    )


def _listed(folder: Path) -> Comparison | None:
    """What `results.json` says, or else `comparison.json`, which lists no runs."""
    for name in (RESULTS_FILE, COMPARISON_FILE):
        if (folder / name).exists():
            return _read_results(folder / name)
    return None


def _cleaned(comparison: Comparison) -> Comparison:
    """Without the numbers of an own function that are not finite, but for the goal's.

    A run without a number for what the comparison is about has not come to an end; another metric
    may have none, as a precision where nothing was found.
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
            f"{folder} is a tuning whose trials are not over: go on with `powernorm tune … "
            f"--resume`; the trials so far: powernorm report {folder / TRIALS_FOLDER}"
        )
    message = f"{folder} holds neither {RESULTS_FILE} nor run folders; expected the --out folder "
    if is_run_folder(folder):
        return f"{folder} is a single run; give the comparison's folder, {folder.resolve().parent}"
    return message + "of `powernorm compare`"


def is_run_folder(path: Path) -> bool:
    """Whether a folder is a run's, finished or not."""
    has_file = (path / RESULT_FILE).exists() or (path / CONFIG_FILE).exists()
    return path.is_dir() and has_file and not (path / MODEL_FILE).exists()


def _headless(folder: Path, runs: list[Run]) -> Comparison:
    """What is known of a comparison without `results.json`: one run's settings."""
    written = JsonObject(folder, {}, _MEND)
    whose = ""
    for run in runs:
        path = folder / run.folder / CONFIG_FILE
        if path.exists():
            written, whose = read_object(path, _MEND), run.folder
            break
    settings = written.values
    return Comparison(
        folder=folder,
        study=_study_of_runs(folder, runs),
        settings_of=whose,
        goal=_goal(written, runs),
        function=_function(written),
        task=str(settings.get("task", folder.name)),
        preset=str(settings.get("preset", "")),
        placement=runs[0].placement,
        settings=settings,
        data={},
        baselines=(),
        runs=runs,
    )


def _goal(written: JsonObject, runs: Sequence[Run]) -> Goal:
    """What a comparison is about; where it does not say so, by what its runs have."""
    if "goal" not in written.values and written.values.get("function") is not None:
        # Which way a metric of its own is better, its name does not say.
        return Goal(metric="valid_loss", direction="min")
    if "goal" not in written.values:
        found = {metric for run in runs for metric in run.metrics}
        return goal_of(next((metric for metric in MAIN if metric in found), PERPLEXITY))
    return _direction(written.child("goal"))


def _direction(goal: JsonObject) -> Goal:
    direction = cast(Literal["min", "max"], goal.choice("direction", ("min", "max")))
    return Goal(metric=goal.text("metric"), direction=direction)


def _function(written: JsonObject) -> FunctionRecord | None:
    if written.values.get("function") is None:
        return None
    row = written.child("function")
    file, sha256 = (
        None if row.values.get(key) is None else row.text(key) for key in ("file", "sha256")
    )
    return FunctionRecord(name=row.text("name"), file=file, sha256=sha256)


def _study_of_runs(folder: Path, runs: Sequence[Run]) -> StudyInfo | None:
    """What the runs are variants of; None where no result says so."""
    for run in runs:
        path = folder / run.folder / RESULT_FILE
        if path.exists():
            study = _study(read_object(path, _MEND))
            if study is not None:
                return study
    return None


def _read_results(path: Path) -> Comparison:
    results = read_object(path, _MEND)
    results.check_format(_FORMAT, "the version of powernorm that wrote the comparison")
    runs = [] if path.name == COMPARISON_FILE else [_run(row) for row in results.children("runs")]
    baselines = results.children("baselines") if "baselines" in results.values else []
    return Comparison(
        folder=path.parent,
        task=results.text("task"),
        preset=_text(results, "preset"),
        placement=_text(results, "placement"),
        settings=results.mapping("settings"),
        data=results.mapping("data") if "data" in results.values else {},
        study=_study(results),
        goal=_direction(results.child("goal")),
        function=_function(results),
        paper=_paper(results),
        paper_statistics=paper_statistics(results, "paper_statistics"),
        reduced=_text(results, "reduced"),
        changes=_changes(results),
        tuning=read_tuning(results),
        score=_direction(results.child("score")) if "score" in results.values else None,
        baselines=[BaselineRow(row.text("name"), _metrics(row)) for row in baselines],
        runs=runs,
        race=_race(results),
        standing=_standing(results),
    )


def _race(results: JsonObject) -> RaceSettings | None:
    if "race" not in results.values:
        return None
    row = results.child("race")
    return RaceSettings(confidence=row.sure_number("confidence"), margin=row.number("margin"))


def _standing(results: JsonObject) -> RaceRecord | None:
    if "standing" not in results.values:
        return None
    row = results.child("standing")
    return RaceRecord(
        metric=row.text("metric"),
        leader=None if row.values.get("leader") is None else row.text("leader"),
        left=row.texts("left"),
        dropped=[_drop(one) for one in row.children("dropped")],
        outcome=cast(RaceOutcome, row.choice("outcome", get_args(RaceOutcome))),
        rounds=row.whole("rounds"),
    )


def _drop(row: JsonObject) -> DropRecord:
    return DropRecord(
        label=row.text("label"),
        after=row.whole("after"),
        behind=row.text("behind"),
        difference=row.number("difference"),
        at_least=row.number("at_least"),
        seeds=row.whole("seeds"),
    )


def _changes(results: JsonObject) -> ChangesRecord | None:
    if "changes" not in results.values:
        return None
    row = results.child("changes")
    preset, rows = row.text("preset"), row.child("settings")
    settings = {name: cast(ChangeRecord, rows.mapping(name)) for name in rows.values}
    return ChangesRecord(preset=preset, settings=settings) if settings else None


def _text(row: JsonObject, key: str) -> str:
    """A string that may be absent."""
    return row.text(key) if key in row.values else ""


def _read_run(folder: Path) -> Run:
    path = folder / RESULT_FILE
    if path.exists():
        return replace(_run(read_object(path, _MEND)), folder=folder.name)
    match = _RUN_NAME.fullmatch(folder.name)
    if match is None:
        raise InputError(
            f"{folder} has no {RESULT_FILE} and its name is not NORM-PLACEMENT-seedN or "
            "NORM-seedN, so nothing says which norm it trains; name it so, or move it out of the "
            "comparison's folder"
        )
    config = folder / CONFIG_FILE
    written = read_object(config, _MEND).values if config.exists() else {}
    return Run(
        norm=str(written.get("norm", match["norm"].replace("+", ":"))),
        label=str(written.get("label", "")),
        placement=match["placement"] or "",
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
    diagnosis = folder / DIAGNOSIS_FILE
    return replace(
        run,
        curve=read_metrics(folder / METRICS_FILE),
        samples=read_norms(folder / NORMS_FILE),
        diagnosis=read_diagnosis(diagnosis) if diagnosis.exists() else None,
        diagnoses=read_diagnoses(folder / DIAGNOSES_FILE),
        scales=_scales(folder / SCALES_FILE),
    )


def _run(row: JsonObject) -> Run:
    status = row.choice("status", KNOWN_STATUSES)
    return Run(
        norm=row.text("norm"),
        placement=_text(row, "placement"),
        seed=row.whole("seed"),
        status=cast(Status, status),
        folder=row.text("folder"),
        metrics=_metrics(row),
        tid=_tid(row),
        seconds=row.number("seconds"),
        tokens_per_second=row.number("tokens_per_second"),
        examples_per_second=_optional(row, "examples_per_second"),
        steps_per_second=_optional(row, "steps_per_second"),
        parameters=None if row.values.get("parameters", 0) is None else row.whole("parameters"),
        message=str(row.values.get("message", "")),
        remark=str(row.values.get("remark", "")),
        label=_text(row, "label"),
        x=_place(row, "x"),
        y=_place(row, "y"),
        signatures=_signatures(row),
        scored=_text(row, "scored"),
    )


def _optional(row: JsonObject, key: str) -> float | None:
    return row.number(key) if key in row.values else None


def _signatures(row: JsonObject) -> dict[str, str]:
    if "signatures" not in row.values:
        return {}
    signatures = row.child("signatures")
    return {metric: signatures.text(metric) for metric in signatures.values}


def _paper(results: JsonObject) -> list[PaperRecord]:
    if "paper" not in results.values:
        return []
    return [_paper_record(row) for row in results.children("paper")]


def _paper_record(row: JsonObject) -> PaperRecord:
    record = PaperRecord(
        norm=row.text("norm"),
        placement=cast(Placement, row.choice("placement", PLACEMENTS)),
        dataset=row.text("dataset"),
        metric=row.text("metric"),
        value=row.number("value"),
        source=row.text("source"),
    )
    if "against" in row.values:
        record["against"] = row.texts("against")
    return record


def _place(row: JsonObject, axis: str) -> float | None:
    value = _optional(row, axis)
    return value if value is not None and isfinite(value) else None


def _study(results: JsonObject) -> StudyInfo | None:
    if "study" not in results.values:
        return None
    row = results.child("study")
    study = StudyInfo(
        name=row.text("name"),
        title=row.text("title"),
        x_label=row.text("x_label"),
        logarithmic=row.values.get("logarithmic") is True,
        source=row.text("source"),
    )
    if "y_label" in row.values:
        study["y_label"] = row.text("y_label")
    return study


def _scales(path: Path) -> list[ScaleRecord]:
    if not path.exists():
        return []
    record = read_object(path, _MEND)
    record.check_format(_SCALES_FORMAT, "the version of powernorm that trained the run")
    return [
        ScaleRecord(
            layer=row.text("layer"),
            weight=row.numbers("weight"),
            deviation=row.numbers("deviation"),
        )
        for row in record.children("layers")
    ]


def _metrics(row: JsonObject) -> dict[str, float | None]:
    metrics = row.child("metrics")
    return {name: metrics.number(name) for name in metrics.values}


def _tid(row: JsonObject) -> TID | None:
    if row.values.get("tid") is None:
        return None
    tid = row.child("tid")
    return TID(
        mean_last=tid.number("mean_last"),
        var_last=_nan_if_none(tid.number("var_last")),
        mean_avg=tid.number("mean_avg"),
        var_avg=_nan_if_none(tid.number("var_avg")),
    )


def _nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value
