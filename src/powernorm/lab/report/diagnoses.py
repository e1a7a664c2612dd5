"""Reading `diagnosis.json` and `diagnoses.jsonl`; what is damaged is named by file and key."""

from pathlib import Path
from typing import Any, Final, Literal, cast

from powernorm.errors import InputError
from powernorm.files import read_text
from powernorm.json_reading import parse_json
from powernorm.lab.report.json_files import JsonObject, read_object
from powernorm.runs import (
    DIAGNOSIS_COLUMNS,
    PLACEMENTS,
    BatchSizeRow,
    DiagnosisRecord,
    EvaluationRow,
    PaperStatistic,
    Placement,
    ScaleRecord,
    SpectrumRecord,
    ThresholdRecord,
    VerdictRecord,
)

_FORMAT: Final = 1
_COMMAND: Final = "`powernorm diagnose`"
_MEND_LINE: Final = "mend or remove the line"
_MEND: Final = f"restore the file, or delete it and run {_COMMAND} again"
_TEXTS: Final = frozenset({"layer", "norm"})
_OPTIONAL_TEXTS: Final = frozenset({"verdict", "reason"})
_ACTIONS: Final = ("keep", "swap", "swap lowest")


def read_diagnosis(path: Path) -> DiagnosisRecord:
    """The diagnosis that a file holds.

    Raises:
        InputError: the file is damaged, or a newer version of powernorm wrote it.
    """
    return _diagnosis(read_object(path, _MEND))


def read_diagnoses(path: Path) -> list[DiagnosisRecord]:
    """The diagnoses of a `diagnoses.jsonl`; an empty list where the file does not exist.

    Raises:
        InputError: a line is damaged, or a newer version of powernorm wrote it; file and line are
            named.
    """
    if not path.exists():
        return []
    text = read_text(path)
    # A last line without its line end is still being written, or its writer was killed.
    complete = text[: text.rfind("\n") + 1].split("\n")[:-1]
    return [
        _diagnosis(_object_of(path, number, line)) for number, line in enumerate(complete, start=1)
    ]


def _object_of(path: Path, number: int, line: str) -> JsonObject:
    values = parse_json(line, str(path), _MEND_LINE, line=number)
    place = path.with_name(f"{path.name}, line {number}")
    if not isinstance(values, dict):
        raise InputError(f"{place}: expected an object; {_MEND_LINE}")
    return JsonObject(place, values, _MEND_LINE)


def _diagnosis(record: JsonObject) -> DiagnosisRecord:
    record.check_format(_FORMAT, _COMMAND)
    step = record.values.get("step")
    diagnosis = DiagnosisRecord(
        format=1,
        model=record.text("model"),
        step=None if step is None else record.whole("step"),
        num_batches=record.whole("num_batches"),
        num_tokens=record.whole("num_tokens"),
        padding=record.sure_number("padding"),
        layers=[_layer(row) for row in record.children("layers")],
        verdict=_verdict(record.child("verdict")),
        batch_sizes=[_batch_size(row) for row in record.children("batch_sizes")],
        spectra=[
            SpectrumRecord(name=row.text("name"), values=row.numbers("values"))
            for row in record.children("spectra")
        ],
        scales=[_scale(row) for row in record.children("scales")],
        evaluation=[_evaluation(row) for row in record.children("evaluation")],
        notes=record.texts("notes"),
    )
    if "epoch" in record.values:
        diagnosis["epoch"] = record.sure_number("epoch")
    if "paper" in record.values:
        diagnosis["paper"] = paper_statistics(record, "paper")
    return diagnosis


def paper_statistics(record: JsonObject, key: str) -> list[PaperStatistic]:
    """What a paper prints of the statistics of norms; empty where the file does not say."""
    return [_paper_statistic(row) for row in record.children(key)] if key in record.values else []


def _paper_statistic(row: JsonObject) -> PaperStatistic:
    statistic = PaperStatistic(
        norm=row.text("norm"),
        placement=cast(Placement, row.choice("placement", PLACEMENTS)),
        dataset=row.text("dataset"),
        metric=row.text("metric"),
        value=row.sure_number("value"),
        source=row.text("source"),
    )
    if "statistics" in row.values:
        statistic["statistics"] = row.text("statistics")
    if "size" in row.values:
        statistic["size"] = row.whole("size")
    return statistic


def _layer(row: JsonObject) -> dict[str, Any]:
    """A row with every column, and whatever else it has."""
    cells: dict[str, Any] = dict(row.values)
    for column in DIAGNOSIS_COLUMNS:
        if column in _TEXTS:
            cells[column] = row.text(column)
        elif column in _OPTIONAL_TEXTS:
            cells[column] = "" if row.values.get(column) is None else row.text(column)
        else:
            cells[column] = row.number(column)
    return cells


def _verdict(row: JsonObject) -> VerdictRecord:
    action = cast(Literal["keep", "swap", "swap lowest"], row.choice("action", _ACTIONS))
    verdict = VerdictRecord(
        action=action,
        norm=None if row.values.get("norm") is None else row.text("norm"),
        lowest=None if row.values.get("lowest") is None else row.whole("lowest"),
        reasons=row.texts("reasons"),
        thresholds=[
            ThresholdRecord(
                quantity=limit.text("quantity"),
                limit=limit.sure_number("limit"),
                source=limit.text("source"),
            )
            for limit in row.children("thresholds")
        ],
    )
    if row.values.get("side") is not None:
        verdict["side"] = row.text("side")
    return verdict


def _batch_size(row: JsonObject) -> BatchSizeRow:
    return BatchSizeRow(
        layer=row.text("layer"),
        tokens=row.whole("tokens"),
        num_batches=row.whole("num_batches"),
        mean_tid=row.number("mean_tid"),
        var_tid=row.number("var_tid"),
        pnv_tid=row.number("pnv_tid"),
        pn_tid=row.number("pn_tid"),
    )


def _scale(row: JsonObject) -> ScaleRecord:
    weight, deviation = row.numbers("weight"), row.numbers("deviation")
    if len(weight) != len(deviation):
        raise row.error(f"weight has {len(weight)} values, deviation {len(deviation)}")
    return ScaleRecord(layer=row.text("layer"), weight=weight, deviation=deviation)


def _evaluation(row: JsonObject) -> EvaluationRow:
    evaluation = EvaluationRow(
        statistics=row.text("statistics"),
        tokens=None if row.values.get("tokens") is None else row.whole("tokens"),
        loss=row.sure_number("loss"),
    )
    if "size" in row.values:
        evaluation["size"] = row.whole("size")
    if "scores" in row.values:
        scores = row.child("scores")
        evaluation["scores"] = {name: scores.number(name) for name in scores.values}
    return evaluation
