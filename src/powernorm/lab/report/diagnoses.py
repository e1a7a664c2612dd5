"""Reading `diagnosis.json`; what is damaged is named by its file and key."""

from pathlib import Path
from typing import Any, Final, Literal, cast

from powernorm.lab.report.json_files import JsonObject, read_object
from powernorm.runs import (
    DIAGNOSIS_COLUMNS,
    BatchSizeRow,
    DiagnosisRecord,
    EvaluationRow,
    ScaleRecord,
    SpectrumRecord,
    ThresholdRecord,
    VerdictRecord,
)

_FORMAT: Final = 1
_COMMAND: Final = "`powernorm diagnose`"
_MEND: Final = f"restore the file, or delete it and run {_COMMAND} again"
_TEXTS: Final = frozenset({"layer", "norm"})
_OPTIONAL_TEXTS: Final = frozenset({"verdict", "reason"})
_ACTIONS: Final = ("keep", "swap", "swap lowest")


def read_diagnosis(path: Path) -> DiagnosisRecord:
    """The diagnosis that a file holds.

    Raises:
        InputError: the file is damaged, or a newer version of powernorm wrote it.
    """
    record = read_object(path, _MEND)
    record.check_format(_FORMAT, _COMMAND)
    step = record.values.get("step")
    return DiagnosisRecord(
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
    return EvaluationRow(
        statistics=row.text("statistics"),
        tokens=None if row.values.get("tokens") is None else row.whole("tokens"),
        loss=row.sure_number("loss"),
    )
