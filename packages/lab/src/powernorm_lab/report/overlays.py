"""Figures and tables of several diagnoses, with a line per norm as mean and range over seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from math import ceil, isfinite
from pathlib import Path
from typing import Any, Final

from pandas import DataFrame

from powernorm.records import DIAGNOSIS_COLUMNS, DiagnosisRecord, LayerMeasures, SpectrumRecord
from powernorm_lab.report import figures, numerals
from powernorm_lab.report.document import write_page
from powernorm_lab.report.drawing import DrawnFigure, short_names
from powernorm_lab.report.figures import (
    bands_of,
    runs_by_name,
    shared_layers,
)
from powernorm_lab.report.lines import (
    Band,
    Panel,
    SeedLine,
    bands_over_seeds,
    panels_figure,
    rows_figure,
)
from powernorm_lab.report.measures import QUANTITIES, Quantity
from powernorm_lab.report.numerals import NOTHING, printable
from powernorm_lab.report.records import ReportedRun
from powernorm_lab.report.statistics import average, mean
from powernorm_lab.report.tables import Table

MAX_LAYERS: Final = 24
"""Largest number of layers with a figure over training; of more, evenly spaced ones are drawn."""
_FEWEST: Final = 2
"""Smallest number of diagnoses for a line over the training of a run."""
_SHOWN: Final = 3
"""Layers whose conditioning is drawn over training, like layers 2, 4 and 6 of six in Wang et al.
2022, Fig. 6."""


TIDS, KAPPAS, LAMBDAS = (QUANTITIES[name] for name in ("tids", "kappas", "lambdas"))


@dataclass(frozen=True)
class OverlayLine:
    """Models of one line: the seeds of a norm, or one model.

    Attributes:
        name: name in the legend.
        diagnoses: diagnoses of the trained models, one per seed.
        runs: runs of the models, if they are runs, with their logs.
    """

    name: str
    diagnoses: Sequence[DiagnosisRecord] = ()
    runs: Sequence[ReportedRun] = ()


def lines_of(runs: Iterable[ReportedRun]) -> list[OverlayLine]:
    """Return a line for each name of runs.

    Diagnoses of unfinished seeds are left out if the norm has finished ones.
    """
    lines = []
    for name, group in runs_by_name(runs).items():
        diagnosed = [run for run in group if run.diagnosis is not None]
        sound = [run for run in diagnosed if run.finished] or diagnosed
        lines.append(OverlayLine(name, [run.diagnosis for run in sound if run.diagnosis], group))
    return lines


# By layer ----------------------------------------------------------------------------------------


def by_layer(lines: Sequence[OverlayLine], prefix: str) -> list[DrawnFigure]:
    """Draw TID, κ_p and λ₁ of each layer of the trained models (W22, Fig. 6 and 7)."""
    layers = _layers(record for line in lines for record in line.diagnoses)
    return [
        drawn
        for quantity in (*TIDS, *KAPPAS, *LAMBDAS)
        for drawn in rows_figure(
            layers,
            [_profile(line, style, layers, quantity) for style, line in enumerate(lines)],
            layers=True,
            title=f"{quantity.title} by layer",
            x_label=quantity.unit,
            logarithmic=True,
            caption=f"{quantity.caption} Top: first layer.",
            prefix=f"{prefix}layers-{quantity.key.replace('_', '-')}",
        )
    ]


def _layers(records: Iterable[DiagnosisRecord]) -> list[str]:
    """Return the distinct names of layers in order of appearance."""
    return list(dict.fromkeys(layer["layer"] for record in records for layer in record["layers"]))


def _profile(line: OverlayLine, style: int, layers: Sequence[str], quantity: Quantity) -> Band:
    seeds = [
        {row["layer"]: _value(row, quantity) for row in record["layers"]}
        for record in line.diagnoses
    ]
    table = DataFrame(seeds, columns=layers).astype(float)
    ends = (table.min().tolist(), table.max().tolist()) if len(seeds) > 1 else ((), ())
    return Band(line.name, style, range(len(layers)), table.mean().tolist(), *ends)


def _in_layers(layers: Sequence[str], quantity: Quantity, record: DiagnosisRecord) -> float | None:
    """Return the mean over the layers that have the quantity; None without any."""
    rows = [row for row in record["layers"] if row["layer"] in layers]
    known = [value for row in rows if (value := _value(row, quantity)) is not None]
    return mean(known) if known else None


def _value(layer: Mapping[str, Any], quantity: Quantity) -> float | None:
    value: float | None = layer.get(quantity.key)
    return None if value is None or not isfinite(value) else quantity.scale * value


# Over training -----------------------------------------------------------------------------------

Measure = Callable[[DiagnosisRecord], float | None]


def over_training(lines: Sequence[OverlayLine], prefix: str) -> list[DrawnFigure]:
    """Draw diagnoses made during training; empty without any (W22, Fig. 4, 6, 7)."""
    records = [record for line in lines for run in line.runs for record in run.diagnoses]
    layers = shared_layers(
        _layers(records),
        (
            {row["layer"] for row in record["layers"] if row["norm"] == run.norm}
            for line in lines
            for run in line.runs
            for record in run.diagnoses
        ),
    )
    if not layers:
        return []
    short = dict(zip(layers, short_names(layers), strict=True))
    ends = {
        f"average of {len(layers)} norms": layers,
        f"{short[layers[-1]]}, the last": layers[-1:],
    }
    single = {short[layer]: [layer] for layer in _spaced(layers, _SHOWN)}
    notes = _epochs(records)
    drawn = []
    for quantity in (*TIDS, *KAPPAS, *LAMBDAS):
        places, source = (ends, [_FIGURE]) if quantity in TIDS else (single, [])
        drawn += panels_figure(
            [
                _panel(lines, quantity, f"{quantity.title}, {place}", part)
                for place, part in places.items()
            ],
            caption=" ".join([quantity.caption, *source, *notes]),
            x_label="step",
            prefix=f"{prefix}training-{quantity.key.replace('_', '-')}",
        )
    for number, name in enumerate(_embeddings(lines)):
        drawn += _spectrum_over_training(lines, name, f"{prefix}spectrum-training-{number}")
    return drawn


_FIGURE: Final = "Compare Wang et al. 2022, Fig. 4."


def every_layer(lines: Sequence[OverlayLine], prefix: str) -> list[DrawnFigure]:
    """Draw TID, κ_50 and λ₁ over training, with one figure per layer."""
    layers = _layers(record for line in lines for run in line.runs for record in run.diagnoses)
    return [
        drawn
        for number, layer in enumerate(_spaced(layers, MAX_LAYERS))
        for drawn in panels_figure(
            [
                _panel(lines, quantity, quantity.title, [layer])
                for quantity in (*TIDS, KAPPAS[1], *LAMBDAS)
            ],
            caption=f"{printable(layer)}, logarithmic.",
            x_label="step",
            prefix=f"{prefix}layer-{number}",
        )
    ]


def _panel(
    lines: Sequence[OverlayLine], quantity: Quantity, title: str, layers: Sequence[str]
) -> Panel:
    bands = _bands(lines, partial(_in_layers, layers, quantity))
    return Panel(title, quantity.unit, bands, logarithmic=True)


def _spaced(layers: Sequence[str], number: int) -> list[str]:
    """Return `number` evenly spaced layers with the last one: of six, three are 2, 4 and 6."""
    if len(layers) <= number:
        return list(layers)
    return [layers[ceil(part * len(layers) / number) - 1] for part in range(1, number + 1)]


def _bands(lines: Sequence[OverlayLine], measure: Measure) -> list[Band]:
    """Return bands of a quantity over the steps of the runs."""

    def over_steps(run: ReportedRun) -> dict[float, float]:
        points = {
            float(record["step"]): value
            for record in run.diagnoses
            if record["step"] is not None and (value := measure(record)) is not None
        }
        return points if len(points) >= _FEWEST else {}

    return bands_of({line.name: line.runs for line in lines}, over_steps)


def _epochs(records: Iterable[DiagnosisRecord]) -> list[str]:
    """Return a sentence about the steps of an epoch, if all runs have the same number."""
    found = {
        round(record["step"] / record["epoch"], 3)
        for record in records
        if record["step"] and record.get("epoch")
    }
    return [f"An epoch is {min(found):g} steps."] if len(found) == 1 else []


def monitored(lines: Sequence[OverlayLine], prefix: str) -> list[DrawnFigure]:
    """Draw parts of gradients and fluctuations in training (S20, Fig. 3, 4); empty without any."""
    runs = {line.name: line.runs for line in lines}
    return figures.monitored(
        runs, (*QUANTITIES["gradients"], *QUANTITIES["fluctuations"]), f"{prefix}monitored-"
    )


# Spectra -----------------------------------------------------------------------------------------


def spectra(lines: Sequence[OverlayLine], prefix: str) -> list[DrawnFigure]:
    """Draw singular values of the embeddings and their cumulative share (S20, Fig. 6)."""
    return [
        drawn
        for number, name in enumerate(_embeddings(lines))
        for drawn in _spectrum(lines, name, f"{prefix}spectrum-{number}")
    ]


def _embeddings(lines: Sequence[OverlayLine]) -> list[str]:
    """Return the names of the embeddings; one empty name if no model has several."""
    records = [*(r for line in lines for r in line.diagnoses)]
    records += [r for line in lines for run in line.runs for r in run.diagnoses]
    if all(len(record["spectra"]) <= 1 for record in records):
        return [""] if any(record["spectra"] for record in records) else []
    return list(dict.fromkeys(one["name"] for record in records for one in record["spectra"]))


def _values_of(record: DiagnosisRecord, name: str) -> list[float]:
    """Return the spectrum of an embedding; empty if it is missing or 0."""
    found: SpectrumRecord | None = next(
        (one for one in record["spectra"] if name in ("", one["name"])), None
    )
    return [] if found is None or not any(found["values"]) else found["values"]


def _spectrum(lines: Sequence[OverlayLine], name: str, prefix: str) -> list[DrawnFigure]:
    values = {
        line.name: [v for record in line.diagnoses if (v := _values_of(record, name))]
        for line in lines
    }
    if not any(values.values()):
        return []
    shares = {
        line: [[part / sum(one) for part in accumulate(one)] for one in listed]
        for line, listed in values.items()
    }
    of = f", {printable(name)}" if name else ""
    return panels_figure(
        [
            Panel(f"Singular values{of}", "σ / σ₁", _index_bands(values), logarithmic=True),
            Panel("Cumulative", "share of their sum", _index_bands(shares)),
        ],
        caption="Singular values of the embedding, divided by the largest, logarithmic (Shen et "
        "al. 2020, Fig. 6); below, the share of their sum up to each. A slow fall means that the "
        "embedding uses its dimensions evenly.",
        x_label="index",
        prefix=prefix,
    )


def _index_bands(spectra: Mapping[str, Sequence[Sequence[float]]]) -> list[Band]:
    return bands_over_seeds(
        {
            name: [SeedLine(dict(enumerate(one, start=1))) for one in listed]
            for name, listed in spectra.items()
        }
    )


def _spectrum_over_training(
    lines: Sequence[OverlayLine], name: str, prefix: str
) -> list[DrawnFigure]:
    def middle(record: DiagnosisRecord) -> float | None:
        values = _values_of(record, name)
        return values[ceil(len(values) / 2) - 1] if values else None

    of = f", {printable(name)}" if name else ""
    return panels_figure(
        [Panel(f"σ at 50 % of the dimensions{of}", "σ / σ₁", _bands(lines, middle))],
        caption="The singular value in the middle over the largest. 1: all dimensions alike.",
        x_label="step",
        prefix=prefix,
    )


def failures(lines: Sequence[OverlayLine]) -> list[str]:
    """Return the reasons for missing diagnoses, without repetitions."""
    found = {
        (run.folder, record["notes"][0] if record["notes"] else ""): record["step"]
        for line in lines
        for run in line.runs
        for record in reversed(run.diagnoses)
        if not record["layers"]
    }
    return [f"{run}, step {step}: {reason}" for (run, reason), step in found.items()]


# Tables ----------------------------------------------------------------------------------------

_COUNTS: Final = [one.name for one in fields(LayerMeasures) if one.type in (int, int | None)]


def overlay_table(lines: Iterable[OverlayLine]) -> Table:
    """Return a table with one row per model."""
    rows = [_row(line, record) for line in lines for record in line.diagnoses]
    return Table.of(rows, ("model", "norm", "verdict"), wide="verdict")


def write_overlay_csv(lines: Iterable[OverlayLine], target: Path) -> None:
    """Write the layers of all models as CSV, with the model in the first column.

    Raises:
        InputError: the file cannot be written.
    """
    rows = [
        {"model": record["model"], **row}
        for line in lines
        for record in line.diagnoses
        for row in record["layers"]
    ]
    # As in `powernorm diagnose --csv`, counts and indices have no fraction.
    table = DataFrame(rows, columns=["model", *DIAGNOSIS_COLUMNS])
    table = table.astype(dict.fromkeys(_COUNTS, "Int64"))
    write_page(table.to_csv(index=False, lineterminator="\r\n"), target)


def _row(line: OverlayLine, record: DiagnosisRecord) -> dict[str, str]:
    last = record["layers"][-1] if record["layers"] else {}
    tids = ("mean_tid", "var_tid")
    return {
        "model": record["model"],
        "norm": line.name,
        "step": NOTHING if record["step"] is None else str(record["step"]),
        "TID last, %": _pair(last.get(key) for key in tids),
        "TID average, %": _pair(average(record["layers"], key) for key in tids),
        "κ 50 % last": numerals.number(last.get("kappa_50")),
        "λ₁ last": numerals.number(last.get("lambda_1")),
        "verdict": " ".join(filter(None, (record["verdict"]["action"], record["verdict"]["norm"]))),
    }


def _pair(values: Iterable[float | None]) -> str:
    return " / ".join(map(numerals.percent, values))
