"""Reading `diagnosis.json` and `diagnoses.jsonl`; what is damaged is named by file and key."""

from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.files import read_text
from powernorm.json_reading import parse_json, read_json_object
from powernorm.lab.schema import record_of
from powernorm.runs import DiagnosisRecord, LayerRow

_MEND_LINE: Final = "mend or remove the line"
_MEND: Final = "restore the file, or delete it and run `powernorm diagnose` again"


def read_diagnosis(path: Path) -> DiagnosisRecord:
    """The diagnosis that a file holds.

    Raises:
        InputError: the file is damaged, or a newer version of powernorm wrote it.
    """
    return _diagnosis(read_json_object(path, _MEND), str(path), _MEND)


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
        _diagnosis(
            parse_json(line, str(path), _MEND_LINE, line=number),
            f"{path}, line {number}",
            _MEND_LINE,
        )
        for number, line in enumerate(complete, start=1)
    ]


def _diagnosis(values: object, place: str, mend: str) -> DiagnosisRecord:
    diagnosis = record_of(DiagnosisRecord, values, place, mend)
    for index, row in enumerate(diagnosis["layers"]):
        # A row has every column, and whatever else it has.
        row |= record_of(LayerRow, row, place, mend, ("layers", index))
        row |= {column: row[column] or "" for column in ("verdict", "reason")}
    for index, scale in enumerate(diagnosis["scales"]):
        weights, deviations = len(scale["weight"]), len(scale["deviation"])
        if weights != deviations:
            raise InputError(
                f"{place}: scales[{index}].weight has {weights} values, deviation {deviations}; "
                f"{mend}"
            )
    return diagnosis
