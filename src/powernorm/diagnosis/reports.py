"""A diagnosis: one row a norm, and the whole as files and text."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.inspection.rows import PERCENT, NormRow, format_rows
from powernorm.inspection.selection import Side
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

_SHOWN: Final = (
    *("name", "kind", "mean_tid", "var_tid", "pn_tid", "kappa_50"),
    *("action", "into"),
)


KEEP: Final = "keep"
"""The verdict for a norm that shall stay."""

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class DiagnosisRow(NormRow):
    """One norm: two-pass TID (fractions), outliers, conditioning, verdict.

    The verdict is the action, `keep`, or `swap` into what is advised; the reason has its numbers.

    Attributes:
        norm: short name of what it computes, of other libraries' norms too; of their norms over
            channels the class.
        index: number of its Transformer layer, 0 next to the input; None outside.
        side: `encoder` or `decoder`, in a model that has both.
        uses_batch_statistics: whether it does so now.
        centered: whether it, or what is advised in its place first (bn), subtracts a mean.
        mean_tid: E_B mean_c |μ_B - μ|/σ_B (Wang et al. 2022, Definition 1) of what the norm
            normalizes; None for one with batch statistics that does not center.
        var_tid: E_B mean_c |σ_B - σ|/σ_B, or of ψ for such a norm.
        pnv_tid: E_B mean_c |ψ_B - ψ|/ψ_B of the input: what PowerNormV would see.
        pn_tid: the same behind a GroupScaling with one group: what PowerNorm would see.
        padded_mean_tid: `mean_tid` with padding counted as tokens; None where nothing is padded.
        padded_var_tid: `var_tid` likewise.
        num_outliers: features whose root mean square is above 6 times the median feature's.
        outlier_ratio: of the loudest feature to the median one.
        outlier_feature: its index.
        top_position: position with the largest mean square, from the first valid token; None
            where the input is no batch of sequences.
        top_position_ratio: to the median position.
        lambda_1: largest eigenvalue of the input's covariance (Wang et al. 2022, Fig. 7).
        kappa_20: λ_1/λ_⌈0.2 d⌉ (Fig. 6); infinite for a degenerate covariance.
        kappa_50: λ_1/λ_⌈0.5 d⌉.
        kappa_80: λ_1/λ_⌈0.8 d⌉.
    """

    norm: str
    index: int | None
    side: Side | None
    uses_batch_statistics: bool
    centered: bool
    mean_tid: float | None = field(metadata=PERCENT)
    var_tid: float = field(metadata=PERCENT)
    pnv_tid: float | None = field(metadata=PERCENT)
    pn_tid: float | None = field(metadata=PERCENT)
    padded_mean_tid: float | None = field(metadata=PERCENT)
    padded_var_tid: float | None = field(metadata=PERCENT)
    num_outliers: int
    outlier_ratio: float
    outlier_feature: int
    top_position: int | None
    top_position_ratio: float | None
    lambda_1: float | None
    kappa_20: float | None
    kappa_50: float | None
    kappa_80: float | None

    @property
    def verdict(self) -> str:
        """`keep`, or the short name of a norm to swap to."""
        return self.into[0] if self.into else KEEP

    def judged(self, verdict: str, reason: str) -> DiagnosisRow:
        """Return the row with a verdict."""
        if verdict == KEEP:
            return replace(self, action="keep", into=(), reason=reason)
        return replace(self, action="swap", into=(verdict,), reason=reason)

    @property
    def total_tid(self) -> float:
        """Mean and var TID together, as the verdict compares it."""
        return (self.mean_tid or 0.0) + self.var_tid

    @property
    def padded_total_tid(self) -> float | None:
        """The same with padding counted; None where nothing is padded."""
        if self.padded_var_tid is None:
            return None
        return (self.padded_mean_tid or 0.0) + self.padded_var_tid

    def to_record(self) -> dict[str, Cell]:
        """Return the values by the keys of `diagnosis.json`."""
        shared = {item.name for item in fields(NormRow)}
        measures = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in shared
        }
        return {"layer": self.name, **measures, "verdict": self.verdict, "reason": self.reason}


@dataclass(frozen=True)
class Diagnosis:
    """What `powernorm.diagnose` found.

    Attributes:
        model: class of the model.
        rows: one a norm, in the order in which the model calls them.
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
    step: int | None = None

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the table as dictionaries, one a norm."""
        return [row.to_dict() for row in self.rows]

    def summary(self) -> TID:
        """TID of the last norm and the average over norms (W22, Tables 1, 4, 6)."""
        last = self.rows[-1]
        means = [layer.mean_tid for layer in self.rows if layer.mean_tid is not None]
        return TID(
            mean_last=last.mean_tid,
            var_last=last.var_tid,
            mean_avg=fmean(means) if means else None,
            var_avg=fmean(layer.var_tid for layer in self.rows),
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
            layers=[_without_infinity(row.to_record()) for row in self.rows],
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
                writer = csv.DictWriter(file, DIAGNOSIS_COLUMNS, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(row.to_record() for row in self.rows)
        except OSError as error:
            raise _unwritable(target, error) from error

    def __str__(self) -> str:
        """The main columns, TID in percent, and the verdict in words."""
        return "\n".join(
            [format_rows(self.rows, _SHOWN), *verdict_lines(self.verdict), *self.notes]
        )


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


def _without_infinity(record: dict[str, Cell]) -> dict[str, Cell]:
    """Infinite values, for which JSON has no word, as None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    reason: Any = error.strerror
    return InputError(f"{path} cannot be written ({reason}): give a path in a folder that can be")
