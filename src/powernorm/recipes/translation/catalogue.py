"""What each recipe of translation needs and costs."""

from typing import Final

from powernorm.recipes.family import EMBEDDED, GPU, RecipeInfo

_IWSLT14: Final = (
    "train.de, train.en, valid.…, test.… of fairseq's prepare-iwslt14.sh before BPE: "
    "--data iwslt14.tokenized.de-en/tmp"
)
_WMT14: Final = (
    "train.en, train.de, valid.…, test.… of fairseq's prepare-wmt14en2de.sh --icml17 before BPE, "
    "whose valid is every 100th line of train (for newstest2013 write its tokens over valid.en and "
    "valid.de): --data wmt14_en_de/tmp"
)
_WMT16: Final = (
    "the prepared WMT16 before BPE as train.en, train.de, newstest2013 as valid.…, newstest2014 "
    "as test.…: --data FOLDER"
)
_IWSLT15: Final = (
    "train.en, train.vi, tst2012 as valid.…, tst2013 as test.…, tokenised: --data FOLDER"
)

CATALOGUE: Final[dict[str, RecipeInfo]] = {
    "smoke": RecipeInfo("translation, a check", EMBEDDED, "seconds"),
    "demo": RecipeInfo("tiny model on a part of the verses", EMBEDDED, "about 6 min on two cores"),
    "verses-small": RecipeInfo(
        "the papers' small model on the verses, 3 seeds",
        EMBEDDED,
        f"about 4 h {GPU}",
        "model of Shen 2020, Wang 2022",
    ),
    "verses-reduced": RecipeInfo(
        "2 + 2 layers of 128, 2,000 steps, 2 seeds",
        EMBEDDED,
        "about 2 h on two cores",
    ),
    "iwslt14-shen2020": RecipeInfo(
        "De-En, small model, pre-norm",
        _IWSLT14,
        f"about 10 h {GPU}",
        "Shen 2020, Table 1",
    ),
    "wmt14-shen2020": RecipeInfo(
        "En-De, big model, pre-norm",
        _WMT14,
        f"about 4 days {GPU}",
        "Shen 2020, Table 1",
    ),
    "iwslt14-wang2022-pre": RecipeInfo(
        "De-En, small model, pre-norm",
        _IWSLT14,
        f"about 6 h {GPU}",
        "Wang 2022, Tables 1-3",
    ),
    "iwslt14-wang2022-post": RecipeInfo(
        "De-En, small model, post-norm",
        _IWSLT14,
        f"about 6 h {GPU}",
        "Wang 2022, Tables 1-3",
    ),
    "wmt16-wang2022-pre": RecipeInfo(
        "En-De, base model, pre-norm",
        _WMT16,
        f"about 12 h {GPU}",
        "Wang 2022, Tables 1-3",
    ),
    "wmt16-wang2022-post": RecipeInfo(
        "En-De, base model, post-norm",
        _WMT16,
        f"about 12 h {GPU}",
        "Wang 2022, Tables 1-3",
    ),
    "iwslt14-xu2019": RecipeInfo(
        "De-En, small model, parts of LayerNorm, AdaNorm",
        _IWSLT14,
        f"about 14 h {GPU}",
        "Xu 2019, Tables 1-4",
    ),
    "wmt14-xu2019": RecipeInfo(
        "En-De, big model, the same norms",
        _WMT14,
        f"about 2 days {GPU}",
        "Xu 2019, Tables 1-4",
    ),
    "iwslt15-xu2019": RecipeInfo(
        "En-Vi, base model, the same norms, two vocabularies",
        _IWSLT15,
        f"about 10 h {GPU}",
        "Xu 2019, Tables 1-4",
    ),
}
