"""A diagnosis in words."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from powernorm.lab.report import numerals
from powernorm.runs import SMALLEST_GAP, DiagnosisRecord, EvaluationRow, VerdictRecord


def lead_words(record: DiagnosisRecord) -> str:
    """What was looked at.

    >>> from powernorm.lab.report.diagnosis_words import lead_words
    >>> record = {"step": 300, "num_batches": 40, "num_tokens": 81_920, "padding": 0.125,
    ...           "layers": [{}, {}]}
    >>> lead_words(record)
    'Step 300. 2 norm layers, 40 batches, 81.9k tokens, 12.50 % of the positions are padding.'
    """
    step = "" if record["step"] is None else f"Step {record['step']}. "
    layers = len(record["layers"])
    padding = "no padding"
    if record["padding"] > 0:
        padding = f"{numerals.percent(record['padding'])} % of the positions are padding"
    return (
        f"{step}{layers} norm {'layer' if layers == 1 else 'layers'}, "
        f"{record['num_batches']} {'batch' if record['num_batches'] == 1 else 'batches'}, "
        f"{numerals.count(record['num_tokens'])} tokens, {padding}."
    )


def verdict_words(verdict: VerdictRecord) -> str:
    """What to do, in one sentence.

    >>> verdict_words({"action": "swap lowest", "norm": "bn", "lowest": 2, "reasons": [],
    ...                "thresholds": []})
    'Swap the norms of the 2 lowest layers to bn and keep the others.'
    """
    norm = numerals.printable(verdict["norm"] or "a norm with batch statistics")
    if verdict["action"] == "swap":
        return f"Swap the norms to {norm}."
    if verdict["action"] == "swap lowest":
        lowest = verdict["lowest"]
        layers = "lowest layers" if lowest is None else f"{lowest} lowest layers"
        layers = "lowest layer" if lowest == 1 else layers
        return f"Swap the norms of the {layers} to {norm} and keep the others."
    return "Keep the norms as they are."


def average(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The mean over the rows that have a value; None where none has."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return fmean(known) if known else None


def swap_call(verdict: VerdictRecord) -> str:
    """The call that does what the verdict says; empty where nothing is to do.

    >>> swap_call({"action": "swap lowest", "norm": "bn", "lowest": 2, "reasons": [],
    ...            "thresholds": []})
    'powernorm.swap(model, "bn", powernorm.Where(lowest=2))'
    """
    norm = verdict["norm"]
    if verdict["action"] == "keep" or norm is None:
        return ""
    where = ""
    if verdict["action"] == "swap lowest":
        side = f', side="{verdict["side"]}"' if "side" in verdict else ""
        where = f", powernorm.Where(lowest={verdict['lowest']}{side})"
    return f'powernorm.swap(model, "{numerals.printable(norm)}"{where})'


def padding_words(record: DiagnosisRecord) -> str:
    """What counting padding as tokens would do; empty where it makes no difference to see."""
    layers = record["layers"]
    parts = []
    for key, name in (("mean_tid", "mean"), ("var_tid", "var")):
        own = average(layers, key)
        padded = average(layers, f"padded_{key}")
        if own is not None and padded is not None:
            parts.append(
                f"average {name} TID {numerals.percent(padded)} % instead of "
                f"{numerals.percent(own)} %"
            )
    if not parts:
        return ""
    share = numerals.percent(record["padding"])
    return f"With padding ({share} % of the positions) counted as tokens: {', '.join(parts)}."


def evaluation_words(rows: Sequence[EvaluationRow]) -> str:
    """How much of the gap between running and batch statistics re-estimation closes.

    >>> evaluation_words([
    ...     {"statistics": "running", "tokens": None, "loss": 4.5},
    ...     {"statistics": "re-estimated", "tokens": None, "loss": 4.2},
    ...     {"statistics": "batch", "tokens": 4096, "loss": 4.0},
    ... ])
    'With running statistics the loss is 4.5000, 0.5000 above that with batch statistics of about \
4.1k predictions (4.0000). Re-estimation closes 60 % of the gap.'
    """
    losses = {row["statistics"]: row["loss"] for row in rows if row["statistics"] != "batch"}
    running, estimated = losses.get("running"), losses.get("re-estimated")
    batches = [row for row in rows if row["statistics"] == "batch"]
    if running is None:
        return ""
    if not batches:
        if estimated is None:
            return f"With running statistics the loss is {running:.4f}."
        return (
            f"With running statistics the loss is {running:.4f}, with re-estimated ones "
            f"{estimated:.4f} ({estimated - running:+.4f})."
        )
    largest = max(batches, key=lambda row: row["tokens"] or 0)
    size = (
        ""
        if largest["tokens"] is None
        # Tokens, images or texts: what the loss is a mean over.
        else f" of about {numerals.count(largest['tokens'])} predictions"
    )
    gap = running - largest["loss"]
    # A share of less than this would be a quotient of rounding and chance.
    if not gap > SMALLEST_GAP * abs(running):
        higher = "no higher than" if gap <= 0 else f"less than {100 * SMALLEST_GAP:g} % above that"
        return (
            f"With running statistics the loss is {running:.4f}, {higher} with batch "
            f"statistics{size} ({largest['loss']:.4f}): there is no gap to close."
        )
    words = (
        f"With running statistics the loss is {running:.4f}, {gap:.4f} above that with batch "
        f"statistics{size} ({largest['loss']:.4f})."
    )
    if estimated is None:
        return words
    share = 100 * (running - estimated) / gap
    if share > 100:
        return (
            f"{words} Re-estimation closes the gap: with re-estimated ones it is {estimated:.4f}."
        )
    if share < 0:
        return f"{words} Re-estimation widens the gap by {-share:.0f} %."
    return f"{words} Re-estimation closes {share:.0f} % of the gap."
