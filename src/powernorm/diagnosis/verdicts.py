"""From numbers to a verdict: keep the norms, swap them, or swap only the lowest layers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from powernorm.diagnosis.layers import LayerDiagnosis
from powernorm.runs import ThresholdRecord, VerdictRecord

Action = Literal["keep", "swap", "swap lowest"]

KEEP: Final = "keep"

_PAPER: Final = (
    "Wang et al. 2022, Table 1: of 20 settings BatchNorm beat LayerNorm in exactly the four whose "
    "last layer had less than 5 % (2.0 to 4.9 %; all others 5.4 % and more)"
)
_PAPER_REGULARIZED: Final = (
    "Wang et al. 2022, Tables 1 and 2: RegularizedBatchNorm was on par with LayerNorm or better in "
    "17 of 20 settings, and clearly worse on WMT16 alone, where BatchNorm had 22 and 38 %"
)
_CHOICE: Final = "a choice of this library: no paper gives one"

_LOUD_POSITION: Final = 10.0
"""A position whose mean square is so many times the median position's is worth a word."""


@dataclass(frozen=True)
class Limits:
    """Up to which discrepancy a norm is advised.

    Args:
        bn: mean and var TID together, of what BatchNorm would see.
        rbn: the same, for RegularizedBatchNorm.
        pn: of the quadratic mean behind a GroupScaling, for PowerNorm.
    """

    bn: float = 0.05
    rbn: float = 0.20
    pn: float = 0.05

    def to_records(self) -> list[ThresholdRecord]:
        """The limits with what they are compared with and where they come from."""
        return [
            ThresholdRecord(quantity="bn: mean_tid + var_tid", limit=self.bn, source=_PAPER),
            ThresholdRecord(
                quantity="rbn: mean_tid + var_tid", limit=self.rbn, source=_PAPER_REGULARIZED
            ),
            ThresholdRecord(quantity="pn: pn_tid", limit=self.pn, source=_CHOICE),
        ]


def judge_layer(layer: LayerDiagnosis, limits: Limits) -> tuple[str, str]:
    """What would do in the place of one norm, and why.

    Returns:
        (verdict, reason): `keep`, or the short name of a norm to swap to.
    """
    norm, reason = _fitting(layer, limits)
    if not layer.uses_batch_statistics:
        return (KEEP if norm == "ln" else norm), reason
    # A norm with batch statistics stays where its own discrepancy is small enough for it.
    own = limits.rbn if layer.norm == "rbn" else limits.bn
    if not layer.centered:
        own = limits.pn
    if layer.total_tid <= own:
        return KEEP, f"its own TID is {_percent(layer.total_tid)} ≤ {_percent(own)}"
    return (norm if norm in ("rbn", "ln") and norm != layer.norm else "ln"), reason


def _fitting(layer: LayerDiagnosis, limits: Limits) -> tuple[str, str]:
    total = layer.total_tid
    if layer.centered and total <= limits.bn:
        return "bn", f"mean and var TID are {_percent(total)} ≤ {_percent(limits.bn)}"
    if layer.centered and total <= limits.rbn:
        return "rbn", (
            f"mean and var TID are {_percent(total)}, between {_percent(limits.bn)} and "
            f"{_percent(limits.rbn)}: the penalty has something to do"
        )
    above = f"TID is {_percent(total)} > {_percent(limits.rbn if layer.centered else limits.pn)}"
    if layer.pn_tid is not None and layer.pn_tid <= limits.pn and layer.centered:
        return "pn", (
            f"{above}, but behind a GroupScaling the quadratic mean moves by "
            f"{_percent(layer.pn_tid)} ≤ {_percent(limits.pn)}"
        )
    return "ln", above


def judge_model(layers: Sequence[LayerDiagnosis], limits: Limits) -> VerdictRecord:
    """The verdict for a model, by its last norm (Wang et al. 2022) and by how far up all do.

    Args:
        layers: those that a swap would change, judged, in the order of their calls.
        limits: that they were judged by.
    """
    last = layers[-1]
    reasons = [f"last norm ({last.layer}): {last.reason}"]
    lowest = _sound_layers(layers)
    action: Action
    if last.uses_batch_statistics:
        action = "keep" if last.verdict == KEEP else "swap"
        norm, lowest = (None if last.verdict == KEEP else last.verdict), None
    elif last.verdict != KEEP:
        action, norm, lowest = "swap", last.verdict, None
    elif lowest:
        action = "swap lowest"
        norm = _weakest([layer for layer in layers if _inside(layer, lowest)])
        reasons.append(f"all norms of the {lowest} lowest layers are fit for it")
    else:
        action, norm, lowest = "keep", None, None
    return VerdictRecord(
        action=action,
        norm=norm,
        lowest=lowest,
        reasons=[*reasons, *_warnings(layers)],
        thresholds=limits.to_records(),
    )


def _sound_layers(layers: Sequence[LayerDiagnosis]) -> int | None:
    """How many of the lowest layers have no norm that has to be kept; None if not even one."""
    numbers = sorted({layer.index for layer in layers if layer.index is not None})
    sound = 0
    for number in numbers:
        inside = [layer for layer in layers if layer.index == number]
        if any(layer.verdict == KEEP for layer in inside):
            break
        sound += 1
    return sound or None


def _inside(layer: LayerDiagnosis, lowest: int) -> bool:
    return layer.index is not None and layer.index < lowest


def _weakest(layers: Sequence[LayerDiagnosis]) -> str:
    """The one norm that fits all: what the most demanding layer asks for."""
    order = ("bn", "rbn", "pn")
    return max((layer.verdict for layer in layers), key=order.index)


def _warnings(layers: Sequence[LayerDiagnosis]) -> list[str]:
    found = []
    loud = max(layers, key=lambda layer: layer.top_position_ratio or 0.0)
    if (loud.top_position_ratio or 0.0) > _LOUD_POSITION:
        found.append(
            f"position {loud.top_position} is {loud.top_position_ratio:.0f} times as loud as the "
            f"others in {loud.layer}: batch statistics are mostly its own"
        )
    outliers = max(layers, key=lambda layer: layer.num_outliers)
    if outliers.num_outliers:
        found.append(
            f"{outliers.num_outliers} features of {outliers.layer} are more than 6 times as loud "
            f"as the median feature; feature {outliers.outlier_feature} "
            f"{outliers.outlier_ratio:.0f} times"
        )
    padded = [layer for layer in layers if layer.padded_total_tid is not None]
    worst = max(padded, key=lambda layer: layer.padded_total_tid or 0.0, default=None)
    if worst is not None and (worst.padded_total_tid or 0.0) > 1.2 * worst.total_tid:
        found.append(
            f"with padding counted as tokens TID would be {_percent(worst.padded_total_tid or 0.0)}"
            f" instead of {_percent(worst.total_tid)} in {worst.layer}: hand the norms the mask"
        )
    return found


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
