"""A diagnosis as a whole: rows, files, text."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from powernorm.diagnosis.layers import Cell, LayerDiagnosis
from powernorm.errors import InputError
from powernorm.inspection.rows import format_table
from powernorm.runs import (
    DIAGNOSIS_COLUMNS,
    TID,
    BatchSizeRow,
    DiagnosisRecord,
    EvaluationRow,
    ScaleRecord,
    SpectrumRecord,
    VerdictRecord,
)

_SHOWN: Final = ("layer", "norm", "mean_tid", "var_tid", "pn_tid", "kappa_50", "verdict")


@dataclass(frozen=True)
class Diagnosis:
    """What `powernorm.diagnose` found.

    Attributes:
        model: class of the model.
        layers: one entry a norm, in the order in which the model calls them.
        verdict: for the model.
        batch_sizes: TID of each norm for the same tokens in batches of other sizes.
        spectra: singular values of the embeddings (Shen et al. 2020, Fig. 6).
        scales: γ against the deviation of the data, for norms with batch statistics (App. B.1).
        evaluation: losses by running, re-estimated and batch statistics, where a loss was given.
        notes: what a reader should know.
        num_batches: gone through in each pass.
        num_tokens: valid ones.
        padding: share of positions that were none.
        step: of the checkpoint, where that is known.
    """

    model: str
    layers: Sequence[LayerDiagnosis]
    verdict: VerdictRecord
    batch_sizes: Sequence[BatchSizeRow]
    spectra: Sequence[SpectrumRecord]
    scales: Sequence[ScaleRecord]
    evaluation: Sequence[EvaluationRow]
    notes: Sequence[str]
    num_batches: int
    num_tokens: int
    padding: float
    step: int | None = None

    def to_rows(self) -> list[dict[str, Cell]]:
        """One dictionary a norm, by `powernorm.runs.DIAGNOSIS_COLUMNS`."""
        return [layer.to_row() for layer in self.layers]

    def summary(self) -> TID:
        """TID of the last norm and the average over norms (W22, Tables 1, 4, 6)."""
        last = self.layers[-1]
        means = [layer.mean_tid for layer in self.layers if layer.mean_tid is not None]
        return TID(
            mean_last=last.mean_tid,
            var_last=last.var_tid,
            mean_avg=fmean(means) if means else None,
            var_avg=fmean(layer.var_tid for layer in self.layers),
        )

    def to_json(self) -> DiagnosisRecord:
        """The contents of a `diagnosis.json`."""
        return DiagnosisRecord(
            format=1,
            model=self.model,
            step=self.step,
            num_batches=self.num_batches,
            num_tokens=self.num_tokens,
            padding=self.padding,
            layers=[layer.to_json() for layer in self.layers],
            verdict=self.verdict,
            batch_sizes=list(self.batch_sizes),
            spectra=list(self.spectra),
            scales=list(self.scales),
            evaluation=[row for row in self.evaluation if math.isfinite(row["loss"])],
            notes=[
                *self.notes,
                # JSON has no word for infinity.
                *(
                    f"evaluated by {row['statistics']} statistics the loss is not finite"
                    for row in self.evaluation
                    if not math.isfinite(row["loss"])
                ),
            ],
        )

    def write_json(self, path: str | Path) -> None:
        """Write a `diagnosis.json`, from which `powernorm report` draws.

        Raises:
            InputError: the file cannot be written.
        """
        text = json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False, indent=1)
        _write(Path(path), text + "\n")

    def write_csv(self, path: str | Path) -> None:
        """Write the rows with a header; cells that do not exist are empty.

        Raises:
            InputError: the file cannot be written.
        """
        target = Path(path)
        try:
            with target.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, DIAGNOSIS_COLUMNS)
                writer.writeheader()
                writer.writerows(self.to_rows())
        except OSError as error:
            raise _unwritable(target, error) from error

    def __str__(self) -> str:
        """The main columns, TID in percent, and the verdict in words."""
        table = format_table([_shown(row) for row in self.to_rows()])
        return "\n".join([table, *verdict_lines(self.verdict), *self.notes])


def verdict_lines(verdict: VerdictRecord) -> list[str]:
    """A verdict in words: what to do, then why."""
    return [f"verdict: {advice(verdict)}", *(f"- {reason}" for reason in verdict["reasons"])]


def advice(verdict: VerdictRecord) -> str:
    """What to do.

    >>> advice({"action": "swap lowest", "norm": "bn", "lowest": 2, "reasons": [],
    ...     "thresholds": []})
    'swap only the 2 lowest layers to bn: powernorm.swap(model, "bn", powernorm.Where(lowest=2))'
    """
    norm, lowest = verdict["norm"], verdict["lowest"]
    if verdict["action"] == "keep":
        return "keep the norms as they are"
    if verdict["action"] == "swap":
        return f'swap to {norm}: powernorm.swap(model, "{norm}")'
    layers = "layer" if lowest == 1 else "layers"
    side = f', side="{verdict["side"]}"' if "side" in verdict else ""
    return (
        f"swap only the {lowest} lowest {layers} to {norm}: "
        f'powernorm.swap(model, "{norm}", powernorm.Where(lowest={lowest}{side}))'
    )


def _shown(row: dict[str, Cell]) -> dict[str, object]:
    return {_heading(name): _text(name, row[name]) for name in _SHOWN}


def _heading(name: str) -> str:
    return f"{name} %" if name.endswith("tid") else name


def _text(name: str, value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{100 * value:.2f}" if name.endswith("tid") else f"{value:.3g}"
    return str(value)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    reason: Any = error.strerror
    return InputError(f"{path} cannot be written ({reason}): give a path in a folder that can be")
