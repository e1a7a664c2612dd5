"""Metrics of runs and quantities of figures, whose texts are in TOML files beside this one."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from statistics import median
from types import MappingProxyType
from typing import Final, Literal, TypeVar

from powernorm.files import package_folder
from powernorm_lab.runs import Goal

PERPLEXITY: Final = "test_perplexity"
VALID_PERPLEXITY: Final = "valid_perplexity"


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric of a run.

    Attributes:
        metric: name in `result.json`.
        heading: heading of its column.
        meaning: description for the glossary.
        higher_is_better: whether it is a score, not a loss.
        others: metrics that are shown with it if it is the main metric.
        decimals: decimals of a difference.
        unit: unit of its axis; empty without one.
    """

    metric: str
    heading: str
    meaning: str
    higher_is_better: bool
    others: Sequence[str] = ()
    decimals: int = 2
    unit: str = ""

    @property
    def better_way(self) -> str:
        """Better direction in words."""
        return "higher" if self.higher_is_better else "lower"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A column of `norms.csv` or of a diagnosis's layers in a figure.

    Attributes:
        key: name of the column.
        title: title of the figure.
        unit: label of the axis.
        caption: description with the paper's figure.
        scale: factor of the values.
        layers: layers of a figure over training.
    """

    key: str
    title: str
    unit: str
    caption: str
    scale: float = 1
    layers: Literal["first", "last", "average"] = "average"


Row = TypeVar("Row")


def _read(file: str, kind: Callable[..., Row]) -> dict[str, list[Row]]:
    """Read the rows of a TOML file of this package by section."""
    text = (package_folder("powernorm_lab.report") / file).read_text(encoding="utf-8")
    sections = tomllib.loads(text)
    return {name: [kind(**row) for row in rows] for name, rows in sections.items()}


COMPOUND_BLEU: Final = "test_bleu_compound"
"""Optional metric of translation."""

MEASURES: Final[Mapping[str, Measure]] = MappingProxyType(
    {row.metric: row for row in _read("measures.toml", Measure)["measure"]}
)
"""Measures by metric."""

QUANTITIES: Final[Mapping[str, Sequence[Quantity]]] = MappingProxyType(
    _read("quantities.toml", Quantity)
)
"""Quantities of figures by section of `quantities.toml`."""

TRANSLATION_SCORES: Final = (
    "test_bleu",
    "test_bleu_tokenised",
    "test_bleu_lowercase",
    COMPOUND_BLEU,
    "test_chrf",
)
"""Metrics of translations, the main one first."""

MAIN: Final = (
    "test_bleu",
    "test_accuracy",
    "test_f1",
    "test_uas",
    "test_bits_per_character",
)
"""Main metrics other than perplexity."""


LONGEST_HEADING: Final = 32
"""Longest heading of a user's metric; the middle of a longer name is cut out."""


def own_heading(metric: str) -> str:
    """Return the heading of a user's metric.

    >>> own_heading("valid_accuracy"), own_heading("_"), own_heading("a" * 20 + "b" * 20)
    ('valid accuracy', '_', 'aaaaaaaaaaaaaaaa…bbbbbbbbbbbbbbb')
    """
    words = " ".join(metric.replace("_", " ").split()) or metric.strip() or "(no name)"
    half = LONGEST_HEADING // 2
    short = words if len(words) <= LONGEST_HEADING else f"{words[:half]}…{words[1 - half :]}"
    # Control characters could move a terminal's cursor.
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in short)


def own_measure(goal: Goal, values: Iterable[float] = ()) -> Measure:
    """Return the measure of a user's metric.

    Args:
        goal: metric and direction.
        values: values of the runs, which determine the decimals of differences.

    >>> own_measure(Goal(metric="valid_accuracy", direction="max"), [0.9132, 0.9218]).decimals
    4
    """
    sizes = [abs(value) for value in values if isfinite(value)]
    return Measure(
        goal["metric"],
        own_heading(goal["metric"]),
        meaning_of_own(goal["metric"]),
        higher_is_better=goal["direction"] == "max",
        decimals=significant_decimals(median(sizes)) if sizes else 2,
    )


def meaning_of_own(metric: str) -> str:
    """Return the meaning of a user's metric for the glossary."""
    named = "" if metric.replace("_", " ") == own_heading(metric) else f" as {metric[:200]!r}"
    return f"Metric that the training returned{named}."


def goal_of(metric: str) -> Goal:
    """Return the goal for one of `MEASURES`.

    >>> goal_of("test_bleu")
    {'metric': 'test_bleu', 'direction': 'max'}
    """
    return Goal(metric=metric, direction="max" if MEASURES[metric].higher_is_better else "min")


def measure_of(metric: str) -> Measure:
    """Return the measure of a metric; for an unknown one, lower is better."""
    return MEASURES.get(metric) or own_measure(Goal(metric=metric, direction="min"))


def heading_of(metric: str) -> str:
    """Return the heading of a metric."""
    return measure_of(metric).heading


def significant_decimals(value: float) -> int:
    """Return the number of decimals for four significant digits.

    >>> [significant_decimals(value) for value in (7251.0, 72.51, 0.9132, 0.002143, 0.0)]
    [0, 2, 4, 6, 2]
    """
    if not value or not isfinite(value):
        return 2
    return max(0, 3 - floor(log10(abs(value))))
