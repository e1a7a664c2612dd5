"""Metrics of runs: their headings, meanings and better directions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor, isfinite, log10
from statistics import median
from types import MappingProxyType
from typing import Final

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
    others: tuple[str, ...] = ()
    decimals: int = 2
    unit: str = ""


_PERCENT: Final = "in percent."
_SEARCHED: Final = "of the translations of the whole test text by beam search, 0 to 100"

COMPOUND_BLEU: Final = "test_bleu_compound"
"""Optional metric of translation."""

_ROWS: Final = (
    Measure(
        PERPLEXITY,
        "test perplexity",
        "Perplexity per word (of a masked language model per masked token, of a tagger per tag) on "
        "the test text, which no choice was made on.",
        higher_is_better=False,
    ),
    Measure(
        VALID_PERPLEXITY,
        "valid perplexity",
        "Perplexity on the validation text.",
        higher_is_better=False,
    ),
    Measure(
        "test_bleu",
        "test BLEU",
        f"Corpus BLEU {_SEARCHED}: detokenized, cased, by sacrebleu's own tokens.",
        higher_is_better=True,
        others=("test_bleu_tokenised", "test_bleu_lowercase", "test_chrf", "test_loss"),
    ),
    Measure(
        "test_bleu_tokenised",
        "BLEU tokenized",
        "BLEU of Moses tokens, cased, as Wang et al. 2022 report it, and Shen et al. 2020 of "
        "WMT14; comes out another number than detokenized BLEU.",
        higher_is_better=True,
    ),
    Measure(
        "test_bleu_lowercase",
        "BLEU lower-case",
        "BLEU of Moses tokens in lower case, as Shen et al. 2020 report it of IWSLT14.",
        higher_is_better=True,
    ),
    Measure(
        COMPOUND_BLEU,
        "BLEU compounds split",
        "BLEU of Moses tokens, cased, with compounds split at their dashes on both sides, as Xu et "
        "al. 2019 report it of WMT14.",
        higher_is_better=True,
    ),
    Measure(
        "test_chrf",
        "chrF",
        f"F-score of character n-grams {_SEARCHED}.",
        higher_is_better=True,
    ),
    Measure(
        "test_loss",
        "test loss",
        "Negative log-likelihood of the test split, nats per target (subword, word or example), "
        "without label smoothing. Lower is better.",
        higher_is_better=False,
    ),
    Measure(
        "test_accuracy",
        "test accuracy",
        f"Share of the test examples whose class is right, {_PERCENT}",
        higher_is_better=True,
        others=(
            *("valid_accuracy", "test_loss", "test_macro_f1", "test_calibration_error"),
            *("test_padding_changed", "test_bucket_changed", "test_padding_difference"),
        ),
        unit="%",
    ),
    Measure(
        "test_macro_f1",
        "macro F1",
        f"Harmonic mean of precision and recall, mean over the classes, {_PERCENT}",
        higher_is_better=True,
    ),
    Measure(
        "test_calibration_error",
        "calibration error",
        "Mean distance of the probability of an answer from the share of such answers that are "
        f"right, over 15 bins (expected calibration error), {_PERCENT} Lower is better.",
        higher_is_better=False,
    ),
    Measure(
        "test_padding_changed",
        "changed by padding",
        "Share of the test series whose answer in a padded batch is another one than alone, "
        f"{_PERCENT} Lower is better.",
        higher_is_better=False,
    ),
    Measure(
        "test_bucket_changed",
        "changed in buckets",
        "The same in batches of series of like length.",
        higher_is_better=False,
    ),
    Measure(
        "test_padding_difference",
        "logits moved",
        "Largest difference of a logit in a padded batch from the same alone. Lower is better.",
        higher_is_better=False,
        decimals=4,
    ),
    Measure(
        "valid_accuracy",
        "valid accuracy",
        f"The same of the validation examples, {_PERCENT}",
        higher_is_better=True,
    ),
    Measure(
        "test_f1",
        "test F1",
        "Harmonic mean of precision and recall over the entities of the test split; an entity "
        f"counts where its words and its kind are right, {_PERCENT}",
        higher_is_better=True,
        others=("test_precision", "test_recall", "valid_f1", "test_loss"),
        unit="%",
    ),
    Measure(
        "test_precision",
        "precision",
        f"Share of the entities found that are right, {_PERCENT}",
        higher_is_better=True,
    ),
    Measure(
        "test_recall",
        "recall",
        f"Share of the entities that are found, {_PERCENT}",
        higher_is_better=True,
    ),
    Measure(
        "valid_f1",
        "valid F1",
        f"F1 of the validation split, {_PERCENT}",
        higher_is_better=True,
    ),
    Measure(
        "test_uas",
        "test UAS",
        "Unlabeled attachment score: share of the words of the test split whose head is right, "
        f"without punctuation, {_PERCENT}",
        higher_is_better=True,
        others=("test_las", "valid_uas", "test_loss", "parsing_sentences_per_second"),
        unit="%",
    ),
    Measure(
        "test_las",
        "test LAS",
        f"Labeled attachment score: the same with the kind of relation, {_PERCENT}",
        higher_is_better=True,
    ),
    Measure(
        "valid_uas",
        "valid UAS",
        f"UAS of the validation split, {_PERCENT}",
        higher_is_better=True,
    ),
    Measure(
        "parsing_sentences_per_second",
        "parsed sentences/s",
        "Sentences of the test split that were parsed in a second on this machine.",
        higher_is_better=True,
    ),
    Measure(
        "test_bits_per_character",
        "test bits/character",
        "Negative log-likelihood of the test text in bits per byte. Lower is better.",
        higher_is_better=False,
        others=("valid_bits_per_character",),
        decimals=4,
    ),
    Measure(
        "valid_bits_per_character",
        "valid bits/character",
        "The same of the validation text.",
        higher_is_better=False,
    ),
)

MEASURES: Final[Mapping[str, Measure]] = MappingProxyType({row.metric: row for row in _ROWS})
"""Measures by metric."""

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


def better_way(measure: Measure) -> str:
    """Return "higher" or "lower", the better direction of a measure."""
    return "higher" if measure.higher_is_better else "lower"


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
