"""The page of several diagnoses side by side."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from powernorm.errors import InputError
from powernorm.files import write
from powernorm.lab.report import numerals, overlays
from powernorm.lab.report.document import Article, SectionParts, document, gallery, part, write_page
from powernorm.lab.report.drawing import DrawnFigure
from powernorm.lab.report.numerals import counted, printable
from powernorm.lab.report.overlays import OverlayLine
from powernorm.lab.report.summary import average
from powernorm.lab.report.tables import Table, copies
from powernorm.runs import DIAGNOSIS_COLUMNS, DiagnosisRecord

_COUNTS: Final = ("num_outliers", "outlier_feature", "top_position")


def write_overlay_page(lines: Sequence[OverlayLine], target: Path) -> Path:
    """Writes the page of several diagnoses; returns its path.

    Raises:
        InputError: it cannot be written there.
    """
    return write_page(render_overlay(lines), target)


def render_overlay(lines: Sequence[OverlayLine]) -> str:
    """The page of several diagnoses."""
    heading = f"Diagnoses: {', '.join(printable(line.name) for line in lines)}"
    return document(heading, [Article(heading, _lead(lines), list(_sections(lines)))])


def overlay_table(lines: Iterable[OverlayLine]) -> Table:
    """The models in numbers, a row each."""
    rows = [_row(line, record) for line in lines for record in line.diagnoses]
    return Table.of(rows, ("model", "norm", "verdict"), wide="verdict")


def write_overlay_csv(lines: Iterable[OverlayLine], target: Path) -> None:
    """Writes the layers of all models as CSV, with the model first.

    Raises:
        InputError: the file cannot be written.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ("model", *DIAGNOSIS_COLUMNS), extrasaction="ignore")
    writer.writeheader()
    for record in (record for line in lines for record in line.diagnoses):
        writer.writerows({"model": record["model"], **_counted(row)} for row in record["layers"])
    try:
        write(target, text.getvalue())
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({error.strerror}): give a path in a folder that can be"
        ) from error


def training_contents(lines: Sequence[OverlayLine], prefix: str) -> list[Markup]:
    """What runs recorded of their diagnoses over the training; empty where none did."""
    contents = _noted(overlays.over_training(lines, prefix))
    layers = overlays.every_layer(lines, prefix)
    if layers:
        summary = f"Layer by layer: {counted(len(layers), 'figure')}"
        contents.append(part("folded", summary, gallery(layers)))
    missing = overlays.failures(lines)
    if missing:
        contents += [part("heading", "Without a diagnosis"), part("bullets", missing)]
    return contents


def _sections(lines: Sequence[OverlayLine]) -> Iterator[SectionParts]:
    table = overlay_table(lines)
    sections = (
        (
            "models",
            "Models",
            [table.html("Models", "TID: mean / deviation. Last: the last norm."), copies(table)],
        ),
        ("training", "Through training", training_contents(lines, "")),
        ("layers", "By layer", _noted(overlays.by_layer(lines, ""))),
        ("gradients", "Gradients and fluctuations", gallery(overlays.monitored(lines, ""))),
        ("spectra", "Spectra of the embeddings", gallery(overlays.spectra(lines, ""))),
    )
    for name, heading, contents in sections:
        if contents:
            yield name, heading, contents


def _lead(lines: Sequence[OverlayLine]) -> str:
    records = [record for line in lines for record in line.diagnoses]
    batches = sorted({record["num_batches"] for record in records})
    return f"{counted(len(records), 'model')}, {' or '.join(map(str, batches))} batches each."


def _counted(row: Mapping[str, Any]) -> dict[str, Any]:
    """A layer as `powernorm diagnose --csv` writes it: counts and places without a fraction."""
    counts = {key: int(row[key]) for key in _COUNTS if row.get(key) is not None}
    return {**row, **counts}


def _noted(drawn: Sequence[DrawnFigure]) -> list[Markup]:
    return [part("paragraph", overlays.NOTE, kind="soft"), *gallery(drawn)] if drawn else []


def _row(line: OverlayLine, record: DiagnosisRecord) -> dict[str, str]:
    last = record["layers"][-1] if record["layers"] else {}
    tids = ("mean_tid", "var_tid")
    return {
        "model": printable(record["model"]),
        "norm": printable(line.name),
        "step": numerals.NOTHING if record["step"] is None else str(record["step"]),
        "TID last, %": _pair(last.get(key) for key in tids),
        "TID average, %": _pair(average(record["layers"], key) for key in tids),
        "κ 50 % last": numerals.number(last.get("kappa_50")),
        "λ₁ last": numerals.number(last.get("lambda_1")),
        "verdict": " ".join(filter(None, (record["verdict"]["action"], record["verdict"]["norm"]))),
    }


def _pair(values: Iterable[float | None]) -> str:
    return " / ".join(map(numerals.percent, values))
