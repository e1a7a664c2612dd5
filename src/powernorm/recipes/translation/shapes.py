"""What several experiments of translation share: the models by their names, optimiser, search."""

from typing import Final

from powernorm.training.config import DataConfig, DecodingConfig, ModelConfig, OptimizerConfig

TASK: Final = "translation"

SMALL: Final = ModelConfig(
    num_features=512,
    num_layers=6,
    num_heads=4,
    feedforward_features=1024,
    dropout=0.3,
    attention_dropout=0.1,
    activation_dropout=0.1,
    activation="relu",
)
"""The model of IWSLT14: 6 + 6 layers of 512 features, 4 heads, 1,024 in the feed-forward networks
(fairseq's `transformer_iwslt_de_en`)."""

BASE: Final = ModelConfig(
    num_features=512,
    num_layers=6,
    num_heads=8,
    feedforward_features=2048,
    dropout=0.1,
    attention_dropout=0.1,
    activation_dropout=0.1,
    activation="relu",
)
"""Vaswani et al. 2017, base."""

BIG: Final = ModelConfig(
    num_features=1024,
    num_layers=6,
    num_heads=16,
    feedforward_features=4096,
    dropout=0.3,
    attention_dropout=0.1,
    activation_dropout=0.1,
    activation="relu",
)
"""Vaswani et al. 2017, big."""

IWSLT14: Final = DataConfig(
    path="iwslt14.tokenized.de-en/tmp",
    languages="de-en",
    tokenised=True,
    vocabulary_size=10000,
    batch_tokens=4096,
    sequence_length=1024,
)
"""IWSLT14 German-English as fairseq's `prepare-iwslt14.sh` leaves it before byte-pair encoding:
tokens of Moses in lower case, train.de, train.en, ….

The script cleans these files by words (1 to 175, ratio 1.5) and its subwords not at all, so nothing
is left out here; 1,024 are the positions of fairseq's models."""

WMT14: Final = DataConfig(
    path="wmt14_en_de/tmp",
    languages="en-de",
    tokenised=True,
    batch_tokens=8 * 4096,
    sequence_length=251,
    max_length_ratio=1.5,
)
"""WMT14 English-German as fairseq's `prepare-wmt14en2de.sh --icml17` leaves it before byte-pair
encoding; of the subwords it keeps 1 to 250 (251 with the end mark) and a ratio of 1.5.

Its valid split is every 100th line of the training text, its test split newstest2014. To choose by
newstest2013, as is usual, tokenise `orig/dev/newstest2013.en` and `.de` of its downloads as the
script tokenises the test split (`tokenizer.perl -a`) and write them over `valid.en` and `valid.de`
of that folder."""

EPOCH_IWSLT14: Final = 1100
"""Updates: 160,239 pairs, about 28 subwords on the longer side, 4,096 to a batch; an estimate."""

IWSLT_SEARCH: Final = DecodingConfig(beam_size=5, length_penalty=1.0)
WMT_SEARCH: Final = DecodingConfig(beam_size=4, length_penalty=0.6)


def adam(
    learning_rate: float, *, weight_decay: float = 0.0, accumulation: int = 1
) -> OptimizerConfig:
    """Return Adam as the papers have it: (0.9, 0.98), no clipping."""
    return OptimizerConfig(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        clip_norm=None,
        accumulation=accumulation,
    )
