"""Named entities (task `ner`): presets from seconds to the experiments of Wang et al. 2022."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from powernorm.models.choices import Placement
from powernorm.recipes import wang2022
from powernorm.recipes.family import EMBEDDED, GPU, Family, RecipeInfo
from powernorm.recipes.paper_results import PaperResult
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    NormOptions,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

TASK: Final = "ner"

NORMS: Final = ("ln", "bn", "rbn", "pn")
"""Table 2 and the best-known of Table 3; `--norms` takes `pn-only`, `brn` and `mabn`, too."""
SENTENCES: Final = 16
"""In a batch."""
EPOCH_CONLL: Final = 14041 // SENTENCES
EPOCH_RESUME: Final = 3821 // SENTENCES
_EPOCH_REDUCED: Final = 14041 // 32
LAMBDA: Final = 0.01
"""λ of the mean on both data sets; that of the variance is 0 (App. B)."""


def smoke() -> ComparisonConfig:
    """Return a check that everything works, in seconds: too short to compare anything."""
    return ComparisonConfig(
        task=TASK,
        preset="smoke",
        norms=("ln", "bn"),
        data=DataConfig(vocabulary_size=2000, batch_size=16),
        model=ModelConfig(
            num_features=32,
            num_layers=1,
            num_heads=2,
            feedforward_features=64,
            activation="relu",
            character_features=16,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        training=TrainingConfig(
            max_steps=40,
            num_threads=1,
            log_every=5,
            validate_every=20,
            monitor_every=10,
            tid_batches=5,
        ),
    )


def demo() -> ComparisonConfig:
    """Return a comparison in minutes on two CPU cores: names in 400 Japanese sentences.

    The sample is small: its 50 test sentences have 126 entities, so one more is 0.8 points of F1.
    """
    return ComparisonConfig(
        task=TASK,
        preset="demo",
        norms=NORMS,
        data=DataConfig(vocabulary_size=2000, sequence_length=128, batch_size=16),
        model=ModelConfig(
            num_features=64,
            num_layers=2,
            num_heads=4,
            feedforward_features=128,
            dropout=0.15,
            attention_dropout=0.15,
            activation="relu",
            embedding_dropout=0.3,
            output_dropout=0.3,
            character_features=32,
        ),
        optimizer=OptimizerConfig(learning_rate=5e-3, clip_norm=5.0),
        training=TrainingConfig(
            max_steps=800,
            num_threads=1,
            log_every=20,
            validate_every=50,
            monitor_every=50,
            tid_batches=25,
        ),
        norm_options={"rbn": _penalties(16)},
    )


def conll_pre() -> ComparisonConfig:
    """Return TENER on CoNLL-2003 with pre-norm, as Wang et al. 2022 train it.

    What their text says: the settings of Yan et al. 2019 [46], 2 layers, a conditional random
    field, SGD with momentum 0.9, 1 % of the steps for warm-up; λ of RegularizedBatchNorm (0.01, 0).
    Their learning rates are lost in our text; that of [46] stands in, 9e-4.

    From [46]: batches of 16 sentences, 100 epochs, linear decay, 14 heads of 128 features, twice as
    many in the feed-forward networks, dropout 0.15 in the layers, 0.5 of the words' embeddings, 0.3
    of the characters', 0.4 before the scores; words in lower case with GloVe's 100 features (6B;
    `data.vectors=glove.6B.100d.txt`; without it the embeddings begin at random, and the score is
    lower), scaled to length 1, and 30 features of a word's characters by a convolution; the best
    epoch of the valid split.

    Where this is another program than theirs: gradients are not clipped (they clip each number at
    5); words without a vector are known if the train split has them twice; no word is dropped at
    random (they drop 2 %); dropout behind the attention, too; the attention is that of their text
    (see `DirectionalAttention`), to which the program adds a term; sequences that the tag scheme
    forbids have probability 0 in training, too; pre-norm has a norm after the last layer. λ belongs
    to the batch's loss, which here is a mean over sentences of the sum over their words, while the
    layer's penalty is divided by the sentences as well: hence 16 λ. Other norms: App. F (4,000
    steps of warm-up of PN, an epoch of BatchNorm for BRN, whose limits then rise to 3 and 5 in as
    many steps as here PN warms up, MABN's window of 16); what is lost there, momentum and groups,
    is that of the layers, and a group for each head. Momentum of BatchNorm and RegularizedBatchNorm
    is their code's, 0.05.
    """
    return _conll("pre")


def conll_post() -> ComparisonConfig:
    """Return TENER on CoNLL-2003 with post-norm, as [46] has it. See `conll_pre`."""
    return _conll("post")


def resume_pre() -> ComparisonConfig:
    """Return TENER on Resume (Zhang and Yang 2018) with pre-norm; see `conll_pre`.

    What differs there: 4 layers (Wang et al. 2022; [46] has 2), 4 heads of 64 features, rate 7e-4,
    50 epochs; the words are characters, so there are no features of theirs. [46] adds vectors of
    pairs of characters, which are left out here; `data.vectors` takes those of characters.
    """
    return _resume("pre")


def resume_post() -> ComparisonConfig:
    """Return TENER on Resume with post-norm. See `resume_pre`."""
    return _resume("post")


def conll_reduced() -> ComparisonConfig:
    """Return a smaller model on CoNLL-2003 without word vectors, for a CPU.

    2 layers of 128 features, 16 epochs of Adam; five or six minutes for a run on one core. Without
    vectors F1 stays eight points below the paper's.
    """
    return ComparisonConfig(
        task=TASK,
        preset="conll-reduced",
        norms=NORMS,
        seeds=(0, 1, 2),
        data=DataConfig(
            path="conll2003", vocabulary_size=20000, sequence_length=128, batch_size=32
        ),
        model=ModelConfig(
            num_features=128,
            num_layers=2,
            num_heads=4,
            feedforward_features=256,
            dropout=0.15,
            attention_dropout=0.15,
            activation="relu",
            placement="pre",
            embedding_features=100,
            embedding_dropout=0.5,
            output_dropout=0.4,
            character_features=30,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, clip_norm=5.0),
        schedule=ScheduleConfig(name="linear", warmup_fraction=0.05),
        training=TrainingConfig(
            max_steps=16 * _EPOCH_REDUCED,
            num_threads=1,
            log_every=50,
            validate_every=_EPOCH_REDUCED,
            monitor_every=100,
            tid_batches=100,
        ),
        norm_options=wang2022.norm_options(
            _penalties(32),
            groups=4,
            pn_warmup=_EPOCH_REDUCED,
            brn_warmup=_EPOCH_REDUCED,
            brn_ramp=_EPOCH_REDUCED,
        ),
    )


def _conll(placement: Placement) -> ComparisonConfig:
    return _tener(
        f"conll-wang2022-{placement}",
        DataConfig(
            path="conll2003", vocabulary_size=30000, sequence_length=128, batch_size=SENTENCES
        ),
        replace(
            _model(
                placement, num_layers=2, num_heads=14, head_features=128, embedding_features=100
            ),
            embedding_dropout=0.5,
            character_features=30,
            character_dropout=0.3,
        ),
        rate=9e-4,
        epoch=EPOCH_CONLL,
        num_epochs=100,
    )


def _resume(placement: Placement) -> ComparisonConfig:
    return _tener(
        f"resume-wang2022-{placement}",
        DataConfig(
            path="ResumeNER", vocabulary_size=30000, sequence_length=256, batch_size=SENTENCES
        ),
        replace(
            _model(placement, num_layers=4, num_heads=4, head_features=64, embedding_features=50),
            embedding_dropout=0.3,
        ),
        rate=7e-4,
        epoch=EPOCH_RESUME,
        num_epochs=50,
    )


def _model(
    placement: Placement,
    *,
    num_layers: int,
    num_heads: int,
    head_features: int,
    embedding_features: int,
) -> ModelConfig:
    width = num_heads * head_features
    return ModelConfig(
        num_features=width,
        num_layers=num_layers,
        num_heads=num_heads,
        feedforward_features=2 * width,
        dropout=0.15,
        attention_dropout=0.15,
        activation="relu",
        placement=placement,
        initialisation="kaiming",
        embedding_features=embedding_features,
        output_dropout=0.4,
    )


def _tener(
    preset: str,
    data: DataConfig,
    model: ModelConfig,
    *,
    rate: float,
    epoch: int,
    num_epochs: int,
) -> ComparisonConfig:
    return ComparisonConfig(
        task=TASK,
        preset=preset,
        norms=NORMS,
        seeds=(0, 1, 2),
        data=data,
        model=model,
        optimizer=OptimizerConfig(name="sgd", learning_rate=rate, momentum=0.9, clip_norm=None),
        schedule=ScheduleConfig(name="linear", warmup_fraction=0.01),
        training=TrainingConfig(
            max_steps=num_epochs * epoch,
            log_every=100,
            validate_every=epoch,
            monitor_every=500,
            tid_batches=200,
        ),
        norm_options=wang2022.norm_options(
            _penalties(SENTENCES),
            groups=model.num_heads,
            pn_warmup=4000,
            brn_warmup=epoch,
            brn_ramp=4000,
        ),
    )


def _penalties(num_sentences: int) -> NormOptions:
    return {"mean_penalty": num_sentences * LAMBDA, "var_penalty": 0.0}


PRESETS: Final[dict[str, Callable[[], ComparisonConfig]]] = {
    "smoke": smoke,
    "demo": demo,
    "conll-wang2022-pre": conll_pre,
    "conll-wang2022-post": conll_post,
    "resume-wang2022-pre": resume_pre,
    "resume-wang2022-post": resume_post,
    "conll-reduced": conll_reduced,
}

MAIN: Final = "Wang et al. 2022, Table 2"
"""Whose rows of ln and bn are those of Table 1."""
OTHERS: Final = "Wang et al. 2022, Table 3"

_TABLES: Final[tuple[tuple[str, Placement, Mapping[str, tuple[float, float]]], ...]] = (
    (MAIN, "post", {"ln": (94.8, 91.3), "bn": (94.5, 90.9), "rbn": (94.8, 91.4)}),
    (MAIN, "pre", {"ln": (94.0, 91.0), "bn": (93.2, 89.9), "rbn": (94.0, 90.6)}),
    (
        OTHERS,
        "post",
        {"pn-only": (94.4, 67.1), "pn": (94.3, 90.9), "brn": (93.6, 89.9), "mabn": (94.4, 90.8)},
    ),
    (
        OTHERS,
        "pre",
        {"pn-only": (5.0, 11.1), "pn": (93.3, 54.1), "brn": (94.1, 91.1), "mabn": (94.8, 90.9)},
    ),
)
"""F1 on Resume and on CoNLL-2003."""


def _results(dataset: str, column: int) -> tuple[PaperResult, ...]:
    return tuple(
        PaperResult(norm, dataset, placement, values[column], source, "test_f1")
        for source, placement, rows in _TABLES
        for norm, values in rows.items()
    )


RESUME_RESULTS: Final = _results("Resume", 0)
CONLL_RESULTS: Final = _results("CoNLL-2003", 1)

_CONLL: Final = (
    "conll2003, fetched by `powernorm data get`, or --data with eng.train, eng.testa, eng.testb; "
    "data.vectors takes glove.6B.100d.txt"
)
_RESUME: Final = "ResumeNER, or --data with train.char.bmes, dev.char.bmes, test.char.bmes"
_TABLES_NAME: Final = "Wang 2022, Tables 1-3"
_VECTORS: Final = (
    "Without data.vectors there are no pretrained word vectors, which are worth several points of "
    "F1."
)
_NO_PAIRS: Final = (
    "Without data.vectors no embedding is pretrained, and those of pairs of characters are left "
    "out."
)

CATALOGUE: Final[dict[str, RecipeInfo]] = {
    "smoke": RecipeInfo("named entities, a check", EMBEDDED, "half a minute on two cores"),
    "demo": RecipeInfo("names, places, dates in Japanese", EMBEDDED, "about 2 min on two cores"),
    "conll-wang2022-pre": RecipeInfo(
        "the paper's tagger on CoNLL-2003, pre-norm", _CONLL, f"about 20 h {GPU}", _TABLES_NAME
    ),
    "conll-wang2022-post": RecipeInfo(
        "the same, post-norm", _CONLL, f"about 20 h {GPU}", _TABLES_NAME
    ),
    "resume-wang2022-pre": RecipeInfo(
        "the paper's tagger on Resume, pre-norm", _RESUME, f"about 3 h {GPU}", _TABLES_NAME
    ),
    "resume-wang2022-post": RecipeInfo(
        "the same, post-norm", _RESUME, f"about 3 h {GPU}", _TABLES_NAME
    ),
    "conll-reduced": RecipeInfo(
        "a small tagger on CoNLL-2003, no word vectors",
        _CONLL.partition(";")[0],
        "about 1 h on one core",
        _TABLES_NAME,
    ),
}

FAMILY: Final = Family(
    TASK,
    PRESETS,
    CATALOGUE,
    measure="test_f1",
    paper_results={
        "conll-wang2022-pre": CONLL_RESULTS,
        "conll-wang2022-post": CONLL_RESULTS,
        "resume-wang2022-pre": RESUME_RESULTS,
        "resume-wang2022-post": RESUME_RESULTS,
        "conll-reduced": CONLL_RESULTS,
    },
    stands_for={"conll-reduced": "conll-wang2022-pre"},
    notes={
        "conll-wang2022-pre": _VECTORS,
        "conll-wang2022-post": _VECTORS,
        "resume-wang2022-pre": _NO_PAIRS,
        "resume-wang2022-post": _NO_PAIRS,
        "conll-reduced": _VECTORS,
    },
)
