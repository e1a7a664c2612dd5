"""Verdict from the measures: keep the norms, swap them, or swap those of the lowest layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal

from powernorm.diagnosis.reports import KEEP, DiagnosisRow
from powernorm.errors import InputError
from powernorm.norms.arguments import check_number
from powernorm.records import ThresholdRecord, VerdictRecord

Action = Literal["keep", "swap", "swap lowest"]

_BATCH: Final = (
    "Wang et al. 2022, Table 1: of 20 settings BatchNorm beat LayerNorm in exactly the four whose "
    "last layer had less than 5 % (2.0 to 4.9 %; all others 5.4 % and more)"
)
_REGULARIZED: Final = (
    "Wang et al. 2022, Tables 1 and 3: of the 18 settings in which BatchNorm had up to 20.7 %, "
    "RegularizedBatchNorm was on par with LayerNorm or better in 17; with 22 and 38 % (WMT16) it "
    "lost"
)
_REGULARIZED_ITSELF: Final = (
    "Wang et al. 2022, Tables 3 and 4: RegularizedBatchNorm lost to LayerNorm in three of the four "
    "settings in which its own was above 9 %, and in none below"
)
_CHOICE: Final = "a choice of this library: no paper gives one"

_CANDIDATES: Final = ("bn", "rbn", "pn")
"""Norms to swap to, in the order of preference: the simplest first."""

_LOUD_POSITION: Final = 10.0
"""Ratio of a position's mean square to the median position's above which a warning is given."""


@dataclass(frozen=True)
class Limits:
    """Largest discrepancies up to which a norm is recommended.

    Args:
        bn: mean plus var TID of BatchNorm's input, in use or in another norm's place.
        rbn: the same, for RegularizedBatchNorm in the place of another norm; at least `bn`.
        rbn_itself: the same, for a RegularizedBatchNorm that is in use already.
        pn: TID of the quadratic mean, for PowerNorm: after a GroupScaling in the place of another
            norm, its own if it is in use.

    Raises:
        InputError: a limit is not a finite number of at least 0, or `rbn` is below `bn`.
    """

    bn: float = 0.05
    rbn: float = 0.21
    rbn_itself: float = 0.09
    pn: float = 0.05

    def __post_init__(self) -> None:
        for item in fields(self):
            check_number(f"limits.{item.name}", getattr(self, item.name), at_least=0)
        if self.rbn < self.bn:
            raise InputError(
                f"limits.rbn is {self.rbn}, below limits.bn, {self.bn}: RegularizedBatchNorm is "
                "for larger discrepancies than BatchNorm"
            )

    def to_records(self) -> list[ThresholdRecord]:
        """Return each limit with the quantity it applies to and its source."""
        total = "mean_tid + var_tid"
        return [
            ThresholdRecord(quantity=f"bn: {total}", limit=self.bn, source=_BATCH),
            ThresholdRecord(quantity=f"rbn: {total}", limit=self.rbn, source=_REGULARIZED),
            ThresholdRecord(
                quantity=f"rbn itself: {total}", limit=self.rbn_itself, source=_REGULARIZED_ITSELF
            ),
            ThresholdRecord(quantity="pn: pn_tid", limit=self.pn, source=_CHOICE),
        ]


def judge_layer(layer: DiagnosisRow, limits: Limits) -> tuple[str, str]:
    """Return the norm recommended to replace a norm, and the reason.

    Returns:
        (verdict, reason): `keep`, or the short name of a norm to swap to.
    """
    if layer.uses_batch_statistics:
        return _judge_batch_norm(layer, limits)
    for norm in _CANDIDATES:
        if _fits(layer, norm, limits):
            return norm, _reason(layer, norm, limits)
    return KEEP, f"mean and var TID are {_percent(layer.total_tid)} > {_percent(limits.rbn)}"


def _judge_batch_norm(layer: DiagnosisRow, limits: Limits) -> tuple[str, str]:
    """Return verdict and reason for a norm with batch statistics, kept if its own TID is low."""
    own = limits.pn
    if layer.centered:
        own = limits.rbn_itself if layer.norm == "rbn" else limits.bn
    value = f"its own TID is {_percent(layer.total_tid)}"
    padded = ""
    if layer.counts_padding:
        counted = _percent(layer.padded_total_tid or 0.0)
        padded = (
            f"; it counts padding, with which its TID is {counted}: powernorm.mask_batch_norms "
            "makes it leave padding out"
        )
    if layer.total_tid <= own:
        return KEEP, f"{value} ≤ {_percent(own)}{padded}"
    above = f"{value} > {_percent(own)}{padded}"
    if layer.norm != "rbn" and layer.centered:
        for norm in ("rbn", "pn"):
            if _fits(layer, norm, limits):
                return norm, f"{above}; {_reason(layer, norm, limits)}"
    return "ln", above


def _fits(layer: DiagnosisRow, norm: str, limits: Limits) -> bool:
    if norm == "pn":
        return layer.pn_tid is not None and layer.pn_tid <= limits.pn
    return layer.centered and layer.total_tid <= (limits.bn if norm == "bn" else limits.rbn)


def _reason(layer: DiagnosisRow, norm: str, limits: Limits) -> str:
    total = _percent(layer.total_tid)
    if norm == "bn":
        return f"mean and var TID are {total} ≤ {_percent(limits.bn)}"
    if norm == "rbn":
        return (
            f"mean and var TID are {total}, between {_percent(limits.bn)} and "
            f"{_percent(limits.rbn)}, where RegularizedBatchNorm's penalty helps"
        )
    return (
        f"TID is {total}, but after a GroupScaling the quadratic mean changes by "
        f"{_percent(layer.pn_tid or 0.0)} ≤ {_percent(limits.pn)}"
    )


def judge_model(layers: Sequence[DiagnosisRow], limits: Limits) -> VerdictRecord:
    """Return the verdict for a model, by its last norm (Wang et al. 2022) and its lowest layers.

    Args:
        layers: rows of the norms that a swap would change, judged, in the order of their calls.
        limits: the limits that they were judged by.
    """
    last = layers[-1]
    reasons = [f"last norm ({_name(last)}): {last.reason}"]
    action: Action = "keep"
    norm, lowest = None, None
    if last.verdict != KEEP:
        action, norm = "swap", last.verdict
    elif not last.uses_batch_statistics:
        lowest, norm = _sound_layers(layers, limits)
        if lowest is not None:
            action = "swap lowest"
            reasons.append(f"in the {lowest} lowest layers {norm} fits everywhere")
    unfit = [
        layer for layer in layers[:-1] if layer.uses_batch_statistics and layer.verdict != KEEP
    ]
    if unfit and action != "swap":
        names = ", ".join(f"{_name(layer)} ({layer.verdict})" for layer in unfit)
        reasons.append(f"of the present norms with batch statistics, swap: {names}")
    verdict = VerdictRecord(
        action=action,
        norm=norm,
        lowest=lowest,
        reasons=[*reasons, *_warnings(layers)],
        thresholds=limits.to_records(),
    )
    if action == "swap lowest" and last.side is not None:
        verdict["side"] = last.side
    return verdict


def _sound_layers(layers: Sequence[DiagnosisRow], limits: Limits) -> tuple[int | None, str | None]:
    """Return the largest number of lowest layers in which one norm fits all, and that norm."""
    inside: list[DiagnosisRow] = []
    found: tuple[int | None, str | None] = (None, None)
    for number in range(len(layers)):
        here = [layer for layer in layers if layer.index == number]
        if not here or any(layer.uses_batch_statistics for layer in here):
            break
        inside += here
        norm = next((n for n in _CANDIDATES if all(_fits(x, n, limits) for x in inside)), None)
        if norm is None:
            break
        found = number + 1, norm
    return found


def _warnings(layers: Sequence[DiagnosisRow]) -> list[str]:
    found = []
    loud = max(layers, key=lambda layer: layer.top_position_ratio or 0.0)
    if (loud.top_position_ratio or 0.0) > _LOUD_POSITION:
        found.append(
            f"position {loud.top_position} is {_times(loud.top_position_ratio)} as loud as the "
            f"median position in {_name(loud)}: it dominates batch statistics"
        )
    outliers = max(layers, key=lambda layer: layer.num_outliers)
    if outliers.num_outliers:
        found.append(
            f"{outliers.num_outliers} features of {_name(outliers)} are more than 6 times as loud "
            f"as the median feature; feature {outliers.outlier_feature} is "
            f"{_times(outliers.outlier_ratio)} as loud"
        )
    sink = max(layers, key=lambda layer: layer.sink_share or 0.0)
    if sink.sink_share:
        found.append(
            f"feature {sink.sink_feature} of {_name(sink)} is above 100 times the token's median "
            f"in {_percent(sink.sink_share)} of tokens: a residual sink"
        )
    flat = max(layers, key=lambda layer: layer.saturated_share or 0.0)
    if flat.saturated_share:
        found.append(
            f"{_percent(flat.saturated_share)} of the values in {_name(flat)} are beyond the "
            "linear range of the norm's function"
        )
    padded = [layer for layer in layers if layer.padded_total_tid is not None]
    worst = max(padded, key=lambda layer: layer.padded_total_tid or 0.0, default=None)
    if worst is not None and (worst.padded_total_tid or 0.0) > 1.2 * worst.total_tid:
        found.append(
            f"with padding counted as tokens TID would be {_percent(worst.padded_total_tid or 0.0)}"
            f" instead of {_percent(worst.total_tid)} in {_name(worst)}: pass the mask to the norms"
        )
    return found


def _name(layer: DiagnosisRow) -> str:
    return layer.name or "the model itself"


def _times(ratio: float | None) -> str:
    return f"{ratio:.0f} times" if ratio is not None and math.isfinite(ratio) else "infinitely"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
