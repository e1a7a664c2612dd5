"""Translation: presets from seconds to the papers' experiments, and the papers' numbers.

Three of the papers here stand on translation with an encoder-decoder Transformer. Those of Shen et
al. 2020 and Wang et al. 2022 change the norms of the encoder only, that of Xu et al. 2019 all.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from powernorm.recipes.family import Family
from powernorm.recipes.paper_results import PaperResult
from powernorm.recipes.translation import shen2020, verses, wang2022, xu2019
from powernorm.recipes.translation.catalogue import CATALOGUE
from powernorm.recipes.translation.shapes import TASK
from powernorm.training.config import ComparisonConfig

__all__ = ["FAMILY", "PAPER_RESULTS", "PRESETS", "TASK"]

PRESETS: Final[dict[str, Callable[[], ComparisonConfig]]] = {
    **verses.PRESETS,
    **shen2020.PRESETS,
    **wang2022.PRESETS,
    **xu2019.PRESETS,
}

PAPER_RESULTS: Final[Mapping[str, tuple[PaperResult, ...]]] = MappingProxyType(
    {
        "verses-small": (*shen2020.IWSLT14_RESULTS, *wang2022.IWSLT14_RESULTS),
        "verses-reduced": (*shen2020.IWSLT14_RESULTS, *wang2022.IWSLT14_RESULTS),
        "iwslt14-shen2020": shen2020.IWSLT14_RESULTS,
        "wmt14-shen2020": shen2020.WMT14_RESULTS,
        "iwslt14-wang2022-pre": wang2022.IWSLT14_RESULTS,
        "iwslt14-wang2022-post": wang2022.IWSLT14_RESULTS,
        "wmt16-wang2022-pre": wang2022.WMT16_RESULTS,
        "wmt16-wang2022-post": wang2022.WMT16_RESULTS,
        "iwslt14-xu2019": xu2019.IWSLT14_RESULTS,
        "wmt14-xu2019": xu2019.WMT14_RESULTS,
        "iwslt15-xu2019": xu2019.IWSLT15_RESULTS,
    }
)
"""What the papers print for each preset, for both placements; the verses stand beside IWSLT14, of
which they have the model."""

FAMILY: Final = Family(
    TASK,
    PRESETS,
    CATALOGUE,
    measure="test_bleu",
    paper_results=PAPER_RESULTS,
    stands_for={"verses-reduced": "verses-small"},
    placed=(
        "optimizer.learning_rate",
        "norm_options.rbn.mean_penalty",
        "norm_options.rbn.var_penalty",
    ),
)
