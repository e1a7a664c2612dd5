"""What a paper says of a norm against LayerNorm, and whether it showed here."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Final, Literal

from powernorm.report.paired import LEAST_SEEDS, PairedGap, paired_gap
from powernorm.report.records import Comparison, Run
from powernorm.report.summary import REFERENCE, references_of
from powernorm.runs import PaperRecord

Outcome = Literal["shown", "opposite", "undecided", "no sign", "few seeds", "unmeasured"]

WORDS: Final[dict[Outcome, str]] = {
    "shown": "shown",
    "opposite": "the opposite",
    "undecided": "not decided by these seeds",
    "no sign": "none: it prints no difference",
    "few seeds": f"fewer than {LEAST_SEEDS} seeds",
    "unmeasured": "not run",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A difference to LayerNorm that a paper prints, and the one measured.

    Attributes:
        norm: short name, or label of a variant.
        metric: of a run.
        source: paper and table.
        dataset: of the paper.
        printed: the paper's number minus its LayerNorm's.
        measured: the same here, seed by seed; None where one of the two was not run.
    """

    norm: str
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
    """The differences to LayerNorm that the papers print for a comparison, in their order."""
    return list(_claims(comparison))


def _claims(comparison: Comparison) -> Iterator[Claim]:
    references = _references(comparison)
    for record in comparison.paper:
        key = _key(record)
        reference = references.get(key)
        if record["norm"] == REFERENCE or reference is None or not _is_number(record["value"]):
            continue
        assert record["value"] is not None
        runs = _runs_of(comparison, record["norm"], record["placement"])
        theirs = references_of(comparison.runs, runs[0]) if runs else []
        yield Claim(
            norm=record["norm"],
            metric=record["metric"],
            source=record["source"],
            dataset=record["dataset"],
            printed=record["value"] - reference,
            measured=paired_gap(runs, theirs, record["metric"]),
        )


def _references(comparison: Comparison) -> dict[tuple[str, str, str, str], float]:
    return {
        _key(record): record["value"]
        for record in comparison.paper
        if record["norm"] == REFERENCE and record["value"] is not None
    }


def _key(record: PaperRecord) -> tuple[str, str, str, str]:
    """What a difference has to have in common: a paper's tables share their LayerNorm."""
    paper = record["source"].partition(",")[0]
    return paper, record["dataset"], record["placement"], record["metric"]


def _is_number(value: float | None) -> bool:
    return value is not None and isfinite(value)


def _runs_of(comparison: Comparison, name: str, placement: str) -> list[Run]:
    return [run for run in comparison.runs if (run.name, run.placement) == (name, placement)]
