"""Classification of texts: presets from seconds to the papers' experiments, and their numbers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from powernorm.recipes.classification import small, wang2022, xu2019
from powernorm.recipes.classification.xu2019 import TASK
from powernorm.recipes.family import EMBEDDED, GPU, Family, Recipe, RecipeInfo
from powernorm.recipes.paper_results import PaperResult

__all__ = ["CATALOGUE", "FAMILY", "MEASURE", "PAPER_RESULTS", "PRESETS", "TASK"]

MEASURE: Final = "test_accuracy"

PRESETS: Final[dict[str, Recipe]] = {
    **small.PRESETS,
    **xu2019.PRESETS,
    **wang2022.PRESETS,
}

_WANG: Final = "Wang 2022, Tables 1-3"
_ZHANG: Final = "train.csv, test.csv, classes.txt of Zhang et al. 2015: --data {}"
_WANG_DATA: Final[Mapping[str, tuple[str, str]]] = {
    "imdb": ("powernorm data get imdb (the training half), or --data aclImdb", "1 h"),
    "sogou": (_ZHANG.format("sogou_news_csv"), "3 h"),
    "dbpedia": (_ZHANG.format("dbpedia_csv"), "3 h"),
    "yelp": (_ZHANG.format("yelp_review_polarity_csv"), "3 h"),
}

CATALOGUE: Final[dict[str, RecipeInfo]] = {
    "smoke": RecipeInfo("classes of film reviews, a check", EMBEDDED, "seconds"),
    "demo": RecipeInfo(
        "film reviews (RT), two layers, six norms", EMBEDDED, "about 1.5 min on two cores"
    ),
    "rt-xu2019": RecipeInfo(
        "RT, 4 layers of 128, parts of LayerNorm, AdaNorm, 5 seeds",
        "embedded (four fifths), or --data with rt-polarity.pos and rt-polarity.neg",
        "about 1.5 min a run on one core, 50 runs",
        "Xu 2019, Tables 1-4",
    ),
    "sst5-xu2019": RecipeInfo(
        "SST-5, the same model and norms",
        "train.txt, dev.txt, test.txt of trees, or train.tsv, dev.tsv, test.tsv: --data trees",
        "about 2 h on one core, an estimate",
        "Xu 2019, Tables 1-4",
    ),
    **{
        f"{name}-wang2022-{placement}": RecipeInfo(
            f"{wang2022.SETS[name].dataset}, 6 layers with a CLS mark, {placement}-norm",
            data,
            f"about {hours} {GPU}",
            _WANG,
        )
        for name, (data, hours) in _WANG_DATA.items()
        for placement in wang2022.PLACEMENTS
    },
}

PAPER_RESULTS: Final[Mapping[str, tuple[PaperResult, ...]]] = MappingProxyType(
    {
        "rt-xu2019": xu2019.RT_RESULTS,
        "sst5-xu2019": xu2019.SST5_RESULTS,
        **{preset: wang2022.results_of(preset.partition("-")[0]) for preset in wang2022.PRESETS},
    }
)
"""What the papers print for each preset, for every placement."""

_STAND_INS: Final = (
    "What the paper does not repeat of its model and training has stand-ins, named in the recipe."
)
_NOTES: Final[Mapping[str, str]] = dict.fromkeys(wang2022.PRESETS, _STAND_INS)
_HALF: Final = "These are reviews of IMDB's training half only."
_DATA_NOTES: Final[Mapping[str, str]] = {
    "rt-xu2019": "These are four fifths of the paper's sentences.",
    "imdb-wang2022-pre": _HALF,
    "imdb-wang2022-post": _HALF,
}

FAMILY: Final = Family(
    TASK,
    PRESETS,
    CATALOGUE,
    measure=MEASURE,
    paper_results=PAPER_RESULTS,
    notes=_NOTES,
    data_notes=_DATA_NOTES,
    placed=(
        "optimizer.learning_rate",
        "norm_options.rbn.mean_penalty",
        "norm_options.rbn.var_penalty",
    ),
)
