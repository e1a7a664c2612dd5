"""Diagnosis report: one row per norm, and the whole report as files and text."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from powernorm.diagnosis.discrepancy import tid_of
from powernorm.errors import InputError
from powernorm.files import write
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.inspection.selection import Side
from powernorm.records import (
    DIAGNOSIS_COLUMNS,
    TID,
    BatchSizeRow,
    DiagnosisRecord,
    EvaluationRow,
    LayerMeasures,
    PaperStatistic,
    ScaleRecord,
    SpectrumRecord,
    VerdictRecord,
    swap_call,
)

_SHOWN: Final = ("name", "action", "into", "mean_tid", "var_tid", "pn_tid", "kappa_50", "kind")
"""Columns, the most important first."""
_PADDED: Final = ("padded_mean_tid", "padded_var_tid")
"""Columns that are shown too if a BatchNorm of torch counts padding."""

KEEP: Final = "keep"
"""Verdict for a norm that should stay."""

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class DiagnosisRow(LayerMeasures, NormRow):
    """One norm: what was measured (see `powernorm.records.LayerMeasures`), and the verdict.

    The verdict is the action: `keep`, or `swap` into the recommended norm. The reason gives its
    numbers.

    Attributes:
        norm: short name of its computation, for other libraries' norms too; the class name for
            their norms over channels.
        index: number of its Transformer layer, 0 next to the input; None outside of layers.
        side: `encoder` or `decoder`, in a model that has both.
        uses_batch_statistics: whether it normalizes by batch statistics now.
        centered: whether it, or the first candidate to replace it (bn), subtracts a mean.
    """

    norm: str
    index: int | None
    side: Side | None
    uses_batch_statistics: bool
    centered: bool

    @property
    def verdict(self) -> str:
        """Verdict: `keep`, or the short name of a norm to swap to."""
        return self.into[0] if self.into else KEEP

    def judged(self, verdict: str, reason: str) -> DiagnosisRow:
        """Return the row with a verdict."""
        if verdict == KEEP:
            return replace(self, action="keep", into=(), reason=reason)
        return replace(self, action="swap", into=(verdict,), reason=reason)

    @property
    def total_tid(self) -> float:
        """Sum of mean and var TID, which the verdict compares."""
        return (self.mean_tid or 0.0) + self.var_tid

    @property
    def padded_total_tid(self) -> float | None:
        """Sum of mean and var TID with padding counted; None if nothing is padded."""
        if self.padded_var_tid is None:
            return None
        return (self.padded_mean_tid or 0.0) + self.padded_var_tid

    @property
    def counts_padding(self) -> bool:
        """Whether it is a BatchNorm of torch in a model whose batches are padded."""
        return self.kind == "batch" and self.padded_var_tid is not None

    def to_record(self) -> dict[str, Cell]:
        """Return the values keyed as in `diagnosis.json`."""
        shared = {item.name for item in fields(NormRow)}
        measures = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in shared
        }
        return {"layer": self.name, **measures, "verdict": self.verdict, "reason": self.reason}


@dataclass(frozen=True)
class Diagnosis(NormTable):
    """Result of `powernorm.diagnose`.

    Attributes:
        model: class of the model.
        rows: one per norm, in the order in which the model calls them.
        verdict: verdict for the model.
        batch_sizes: TID of each norm for the same tokens in batches of other sizes.
        spectra: singular values of the embeddings (Shen et al. 2020, Fig. 6).
        scales: γ against the deviation of the data, for norms with batch statistics (App. B.1).
        evaluation: losses by running, re-estimated and batch statistics, if a loss was given,
            and scores if they were requested.
        notes: remarks on the data and the measurement.
        num_batches: number of batches in each pass.
        num_tokens: number of valid tokens.
        padding: share of positions that are padding.
        left_out: the model's norms that were not measured, with the reasons.
        step: step of the checkpoint, if it is known.
        paper: a paper's printed statistics of the norm, for a run of one of its recipes.
    """

    model: str
    rows: Sequence[DiagnosisRow]
    verdict: VerdictRecord
    batch_sizes: Sequence[BatchSizeRow]
    spectra: Sequence[SpectrumRecord]
    scales: Sequence[ScaleRecord]
    evaluation: Sequence[EvaluationRow]
    notes: Sequence[str]
    num_batches: int
    num_tokens: int
    padding: float
    left_out: Sequence[NormRow] = ()
    step: int | None = None
    paper: Sequence[PaperStatistic] = ()

    def summary(self) -> TID:
        """Return the TID of the last norm and the mean over norms (W22, Tables 1, 4, 6)."""
        return tid_of(self.rows)

    def to_json(self) -> DiagnosisRecord:
        """Return the contents of a `diagnosis.json`."""
        record = DiagnosisRecord(
            format=1,
            model=self.model,
            step=self.step,
            num_batches=self.num_batches,
            num_tokens=self.num_tokens,
            padding=self.padding,
            layers=[_without_infinity(row.to_record()) for row in self.rows],
            verdict=self.verdict,
            batch_sizes=list(self.batch_sizes),
            spectra=list(self.spectra),
            scales=list(self.scales),
            evaluation=[row for row in self.evaluation if math.isfinite(row["loss"])],
            notes=[
                *self.notes,
                # JSON cannot represent infinity.
                *(
                    f"evaluated by {row['statistics']} statistics the loss is not finite"
                    for row in self.evaluation
                    if not math.isfinite(row["loss"])
                ),
            ],
        )
        if self.paper:
            record["paper"] = list(self.paper)
        return record

    def write_json(self, path: str | Path) -> None:
        """Write a `diagnosis.json`, from which `powernorm report` makes its plots.

        Raises:
            InputError: the file cannot be written.
        """
        text = json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False, indent=1)
        _write(Path(path), text + "\n")

    def write_csv(self, path: str | Path) -> None:
        """Write the rows as CSV with a header; missing values are empty cells.

        Raises:
            InputError: the file cannot be written.
        """
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, DIAGNOSIS_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row.to_record() for row in self.rows)
        _write(Path(path), text.getvalue())

    def _columns(self) -> Sequence[str]:
        padded = any(row.counts_padding for row in self.rows)
        return [*_SHOWN[:5], *_PADDED, *_SHOWN[5:]] if padded else _SHOWN

    def _notes(self) -> list[str]:
        """Return the verdict in words, then the remarks."""
        others = [f"not measured: {row.name}: {row.reason}" for row in self.left_out]
        return [*_verdict_lines(self.verdict), *self.notes, *others]


def _verdict_lines(verdict: VerdictRecord) -> list[str]:
    """Return a verdict in words: the recommended action, then the reasons."""
    return [f"verdict: {advice(verdict)}", *(f"- {reason}" for reason in verdict["reasons"])]


def advice(verdict: VerdictRecord) -> str:
    """Return the recommended action in words.

    >>> advice({"action": "swap lowest", "norm": "bn", "lowest": 2, "reasons": [],
    ...     "thresholds": []})
    'swap only the 2 lowest layers to bn: powernorm.swap(model, "bn", powernorm.Where(lowest=2))'
    """
    norm, lowest, call = verdict["norm"], verdict["lowest"], swap_call(verdict)
    if not call:
        return "keep the norms as they are"
    if lowest is None:
        return f"swap to {norm}: {call}"
    layers = "layer" if lowest == 1 else "layers"
    return f"swap only the {lowest} lowest {layers} to {norm}: {call}"


def _without_infinity(record: dict[str, Cell]) -> dict[str, Cell]:
    """Return a record with None for infinite values, which JSON cannot represent."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def _write(path: Path, text: str) -> None:
    try:
        write(path, text)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): give a path in a folder that can be"
        ) from error
