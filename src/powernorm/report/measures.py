"""What a comparison can be about: the metrics of a run, how they are called and which way is up."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

PERPLEXITY: Final = "test_perplexity"


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric of a run.

    Attributes:
        metric: its name in `result.json`.
        heading: of its column.
        meaning: what it is, for the glossary.
        higher_is_better: whether it is a score, not a loss.
    """

    metric: str
    heading: str
    meaning: str
    higher_is_better: bool


_SEARCHED: Final = "of the translations of the whole test text by beam search, 0 to 100"

_ROWS: Final = (
    Measure(
        PERPLEXITY,
        "test perplexity",
        "Perplexity on the test text, which no choice was made on.",
        higher_is_better=False,
    ),
    Measure(
        "test_bleu",
        "test BLEU",
        f"Corpus BLEU {_SEARCHED}: detokenised, cased, by sacrebleu's own tokens.",
        higher_is_better=True,
    ),
    Measure(
        "test_bleu_tokenised",
        "BLEU tokenised",
        "BLEU of Moses tokens, cased, as Wang et al. 2022 report it, and Shen et al. 2020 of "
        "WMT14; comes out another number than detokenised BLEU.",
        higher_is_better=True,
    ),
    Measure(
        "test_bleu_lowercase",
        "BLEU lower-case",
        "BLEU of Moses tokens in lower case, as Shen et al. 2020 report it of IWSLT14.",
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
        "Cross entropy of the test text, nats per target subword, without label smoothing. Lower "
        "is better.",
        higher_is_better=False,
    ),
)

MEASURES: Final[Mapping[str, Measure]] = MappingProxyType({row.metric: row for row in _ROWS})
"""By metric."""

SCORES: Final = tuple(row.metric for row in _ROWS if row.higher_is_better)
"""Metrics of translations, the main one first."""


def heading_of(metric: str) -> str:
    """What a metric is called; its own name where it is none of `MEASURES`."""
    return MEASURES[metric].heading if metric in MEASURES else metric
