"""The Tensorized Transformer as Shen et al. 2020 and Wang et al. 2022 set it, but causal.

Both papers train Ma et al.'s model with one core. Its published code sees the future; here it is
masked unless `model.sees_future` is set, so the papers' perplexities are of something else.

The papers' words are the vocabulary of their files. Here the same files are read over byte-pair
subwords, with as large a vocabulary, and perplexity is still per word: the likelihood of a word is
the product over its subwords, so that it can be compared with one over words. Two things differ:
segments of L subwords hold a little less text, and a word that is rare is spelled, not `<unk>`
(which the Penn Treebank's files hold in print, and is then a word like any other).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from powernorm.models.choices import Placement
from powernorm.recipes import wang2022
from powernorm.recipes.family import GPU, Recipe, RecipeInfo
from powernorm.recipes.language_modeling.plain import TASK, full
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    NormOptions,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

NORMS: Final = ("ln", "bn", "rbn", "pnv", "pn")
"""Those of S20 Table 2 and W22 Table 2; `--norms` takes `pn-only`, `brn` and `mabn` of W22 Table 3,
too."""
HEAD_FEATURES: Final = 40
WARMUP: Final = 4000
"""Steps of PowerNorm with batch statistics (S20, W22 App. F)."""
PTB_EPOCH: Final = 929_589 // (120 * 32)
WIKITEXT_EPOCH: Final = 103_227_021 // (60 * 80)
"""Updates in which a batch has seen as many positions as the train split has words, line ends
included; the subwords are a few more."""
PTB_PENALTIES: Final[Mapping[Placement, NormOptions]] = {
    "pre": {"mean_penalty": 0.01, "var_penalty": 0.0},
    "post": {"mean_penalty": 0.1, "var_penalty": 0.01},
}
WIKITEXT_PENALTIES: Final[Mapping[Placement, NormOptions]] = {
    "pre": {"mean_penalty": 0.1, "var_penalty": 0.0},
    "post": {"mean_penalty": 0.1, "var_penalty": 0.01},
}
WIKITEXT_FOLDER: Final = "wikitext-103"
CUTOFFS: Final = (20_000, 40_000, 200_000)
"""Of Transformer-XL on the same text (Dai et al. 2019), which the papers' code is made from."""


def ptb_pre() -> ComparisonConfig:
    """Return the Penn-Treebank setting with pre-norm; λ of RegularizedBatchNorm (0.01, 0).

    3 layers, 256 features, one head of 40, 2,100 in the feed-forward networks, segments of 32
    without memory, batches of 120, dropout 0.3, 20,000 steps of Adam at 2.5e-4 with linear decay,
    label smoothing 0.1 and 4,000 warm-up steps of rate and PowerNorm (S20; W22 say neither). S20
    trains 30 epochs, "for all the experiments" with pre-norm; W22 have both placements, and S20's
    53.2 of LayerNorm is that of their post-norm.

    Not in the texts, so what `full` has: no weight decay, Adam's β (0.9, 0.98), gradients clipped
    at 1. `--data` with the Penn Treebank's files gives the papers' text.

    S20 has GroupScaling in front of BatchNorm, PowerNormV and PowerNorm, W22 in front of PowerNorm
    alone: here `pnv`, which S20 alone prints, has it, and `bn` is W22's.
    """
    return _ptb("pre")


def ptb_post() -> ComparisonConfig:
    """Return the Penn-Treebank setting with post-norm; λ (0.1, 0.01). See `ptb_pre`."""
    return _ptb("post")


def wikitext_pre() -> ComparisonConfig:
    """Return the WikiText-103 setting with pre-norm; λ of RegularizedBatchNorm (0.1, 0).

    6 layers, segments of 80, batches of 60, dropout 0.1 (W22; S20 has 0.3 "in all the datasets"),
    200,000 steps, an adaptive softmax. The number of features, of the head and of the feed-forward
    networks are not in the texts: those of the Penn Treebank stand in. S20's label smoothing has no
    meaning for an adaptive softmax, whose clusters are not run where no target lies, and is left
    out. Subwords: as many as the text has words, 267,735.
    """
    return _wikitext("pre")


def wikitext_post() -> ComparisonConfig:
    """Return the WikiText-103 setting with post-norm; λ (0.1, 0.01). See `wikitext_pre`."""
    return _wikitext("post")


def _ptb(placement: Placement) -> ComparisonConfig:
    base = full()
    return replace(
        base,
        preset=f"ptb-tensorized-{placement}",
        norms=NORMS,
        model=replace(
            base.model,
            architecture="tensorized",
            num_heads=1,
            head_features=HEAD_FEATURES,
            placement=placement,
        ),
        norm_options=_norm_options(PTB_PENALTIES[placement], PTB_EPOCH),
    )


def _wikitext(placement: Placement) -> ComparisonConfig:
    return ComparisonConfig(
        task=TASK,
        preset=f"wikitext103-tensorized-{placement}",
        norms=NORMS,
        data=DataConfig(
            path=WIKITEXT_FOLDER,
            vocabulary_size=267_735,
            sequence_length=80,
            batch_size=60,
            evaluation_batch_size=60,
        ),
        model=ModelConfig(
            architecture="tensorized",
            num_features=256,
            num_layers=6,
            num_heads=1,
            head_features=HEAD_FEATURES,
            feedforward_features=2100,
            dropout=0.1,
            activation="relu",
            placement=placement,
            adaptive_cutoffs=CUTOFFS,
        ),
        optimizer=OptimizerConfig(learning_rate=2.5e-4),
        schedule=ScheduleConfig(name="linear", warmup_fraction=0.02),
        training=TrainingConfig(
            max_steps=200_000,
            log_every=500,
            validate_every=5000,
            monitor_every=500,
            tid_batches=200,
            norm_warmup_fraction=0.02,
        ),
        norm_options=_norm_options(WIKITEXT_PENALTIES[placement], WIKITEXT_EPOCH),
    )


def _norm_options(penalties: NormOptions, epoch: int) -> dict[str, NormOptions]:
    """Return W22's settings, and S20's layer-scale of PowerNormV, as of PowerNorm: one group."""
    options = wang2022.norm_options(
        penalties, groups=1, pn_warmup=WARMUP, brn_warmup=epoch, brn_ramp=WARMUP
    )
    return {**options, "pnv": {"groups": 1}}


PRESETS: Final[dict[str, Recipe]] = {
    "ptb-tensorized-pre": ptb_pre,
    "ptb-tensorized-post": ptb_post,
    "wikitext103-tensorized-pre": wikitext_pre,
    "wikitext103-tensorized-post": wikitext_post,
}

_PTB: Final = "embedded, or --data with ptb.train.txt, ptb.valid.txt, ptb.test.txt"
_WIKITEXT: Final = (
    "wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens: --data " + WIKITEXT_FOLDER
)
_SHEN_WANG: Final = "Shen 2020, Table 2; Wang 2022, Tables 1-3"

CATALOGUE: Final[dict[str, RecipeInfo]] = {
    "ptb-tensorized-pre": RecipeInfo(
        "Tensorized Transformer, masked, Penn Treebank, pre-norm",
        _PTB,
        f"about 5 h {GPU}",
        _SHEN_WANG,
    ),
    "ptb-tensorized-post": RecipeInfo(
        "the same, post-norm", _PTB, f"about 5 h {GPU}", "Wang 2022, Tables 1-3"
    ),
    "wikitext103-tensorized-pre": RecipeInfo(
        "Tensorized Transformer, masked, WikiText-103, pre-norm",
        _WIKITEXT,
        f"about 2 days {GPU}",
        _SHEN_WANG,
    ),
    "wikitext103-tensorized-post": RecipeInfo(
        "the same, post-norm", _WIKITEXT, f"about 2 days {GPU}", "Wang 2022, Tables 1-3"
    ),
}

_MASKED: Final = (
    "The papers' code of the same model sees the future; here it is masked. The text is read over "
    "subwords, and perplexity is per word."
)

NOTES: Final[dict[str, str]] = {
    "ptb-tensorized-pre": _MASKED,
    "ptb-tensorized-post": _MASKED,
    "wikitext103-tensorized-pre": f"{_MASKED} There is no label smoothing.",
    "wikitext103-tensorized-post": f"{_MASKED} There is no label smoothing.",
}
