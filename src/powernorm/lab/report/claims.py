"""What a paper says of a norm against another, and whether it showed here."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Final, Literal, TypeGuard

from powernorm.lab.report.paired import LEAST_SEEDS, PairedGap, paired_gap, untested
from powernorm.lab.report.records import Comparison, ReportedRun
from powernorm.lab.report.summary import REFERENCE
from powernorm.runs import PaperRecord

Outcome = Literal["shown", "opposite", "undecided", "no sign", "few seeds", "unmeasured"]

WORDS: Final[dict[Outcome, str]] = {
    "shown": "the same (p alone)",
    "opposite": "the opposite (p alone)",
    "undecided": "not decided by these seeds",
    "no sign": "none: it prints no difference",
    "few seeds": f"fewer than {LEAST_SEEDS} seeds",
    "unmeasured": "not run",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A difference between two norms that a paper prints, and the one measured.

    Attributes:
        norm: short name, or label of a variant.
        against: the one that the paper compares it with, LayerNorm for most.
        metric: of a run.
        source: paper and table.
        dataset: of the paper.
        printed: the paper's number minus the other's.
        measured: the same here, seed by seed; None where one of the two was not run.
    """

    norm: str
    against: str
    metric: str
    source: str
    dataset: str
    printed: float
    measured: PairedGap | None

    @property
    def outcome(self) -> Outcome:
        """Whether the sign of the paper's difference showed: the 95 % interval leaves 0 out."""
        if self.measured is None:
            return "unmeasured"
        if self.printed == 0:
            return "no sign"
        if self.measured.count < LEAST_SEEDS:
            return "few seeds"
        if not self.measured.is_clear:
            return "undecided"
        same = (self.measured.difference > 0) == (self.printed > 0)
        return "shown" if same else "opposite"


def claims(comparison: Comparison) -> list[Claim]:
    """The differences that the papers print for a comparison, in their order."""
    return list(_claims(comparison))


def _claims(comparison: Comparison) -> Iterator[Claim]:
    printed = {_key(record, record["norm"]): record["value"] for record in comparison.paper}
    for record in comparison.paper:
        for against in record.get("against", [REFERENCE]):
            value, reference = record["value"], printed.get(_key(record, against))
            if record["norm"] == against or not _is_number(value) or not _is_number(reference):
                continue
            runs, theirs = (
                _runs_of(comparison, norm, record["placement"])
                for norm in (record["norm"], against)
            )
            measured = paired_gap(runs, theirs, record["metric"])
            yield Claim(
                norm=record["norm"],
                against=against,
                metric=record["metric"],
                source=record["source"],
                dataset=record["dataset"],
                printed=value - reference,
                measured=measured if comparison.race is None else untested(measured),
            )


def _key(record: PaperRecord, norm: str) -> tuple[str, str, str, str, str]:
    """Where the number of a norm stands: a paper's tables share their rows."""
    paper = record["source"].partition(",")[0]
    return paper, record["dataset"], record["placement"], record["metric"], norm


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)


def _runs_of(comparison: Comparison, name: str, placement: str) -> list[ReportedRun]:
    return [run for run in comparison.runs if (run.name, run.placement) == (name, placement)]
