"""The perplexities that Shen et al. 2020 and Wang et al. 2022 print of their language models.

Theirs is a Tensorized Transformer whose published code sees the future (it builds a causal mask and
never applies it), so these are no targets for a causal model: they say what was reported.
"""

import math
from typing import Final

from powernorm.models.choices import Placement
from powernorm.recipes.paper_results import PaperResult

PENN_TREEBANK: Final = "Penn Treebank"
WIKITEXT: Final = "WikiText-103"

_SHEN: Final = "Shen et al. 2020, Table 2"
_WANG_MAIN: Final = "Wang et al. 2022, Table 2"
_WANG_VARIANTS: Final = "Wang et al. 2022, Table 3"


def _rows(
    source: str, placement: Placement, results: dict[str, tuple[float, float]]
) -> tuple[PaperResult, ...]:
    datasets = (PENN_TREEBANK, WIKITEXT)
    return tuple(
        PaperResult(norm, dataset, placement, perplexity, source)
        for norm, perplexities in results.items()
        for dataset, perplexity in zip(datasets, perplexities, strict=True)
    )


PAPER_RESULTS: Final[tuple[PaperResult, ...]] = (
    *_rows(
        _SHEN,
        "pre",
        {"ln": (53.2, 20.9), "bn": (60.7, 27.2), "pnv": (55.3, 21.3), "pn": (47.6, 17.9)},
    ),
    *_rows(_WANG_MAIN, "post", {"ln": (53.2, 20.9), "bn": (45.9, 17.2), "rbn": (44.6, 17.1)}),
    *_rows(_WANG_MAIN, "pre", {"ln": (54.5, 24.6), "bn": (45.9, 17.8), "rbn": (43.2, 17.1)}),
    *_rows(
        _WANG_VARIANTS,
        "post",
        {
            "pn-only": (254.6, math.inf),
            "pn": (49.8, 21.0),
            "brn": (45.1, 17.3),
            "mabn": (47.4, 33.6),
        },
    ),
    *_rows(
        _WANG_VARIANTS,
        "pre",
        {
            "pn-only": (48.6, math.inf),
            "pn": (59.8, 20.9),
            "brn": (45.7, 17.5),
            "mabn": (48.7, math.inf),
        },
    ),
)
"""Test perplexities that the papers print."""


def results_on(dataset: str) -> tuple[PaperResult, ...]:
    """Return those on one of the data sets."""
    return tuple(result for result in PAPER_RESULTS if result.dataset == dataset)
