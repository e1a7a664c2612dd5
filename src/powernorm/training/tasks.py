"""What depends on the task of a comparison: its batches, its model and what has to be beaten."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

import torch

from powernorm.data.baselines import (
    BigramModel,
    UnigramModel,
    baseline_metrics,
    tag_metrics,
)
from powernorm.data.batch import IGNORED
from powernorm.data.readers import load_corpus
from powernorm.data.subwords import EncodedCorpus, encode_by, encode_corpus
from powernorm.data.tagged_words import EncodedTags, encode_treebank, encode_treebank_by
from powernorm.data.treebanks import load_treebank
from powernorm.errors import InputError
from powernorm.runs import Baseline
from powernorm.training.batches import (
    LanguageModelData,
    MaskedSentenceData,
    RunData,
    TaggedSentenceData,
)
from powernorm.training.config import ComparisonConfig

_Encoded = TypeVar("_Encoded", bound=EncodedCorpus)


@dataclass(frozen=True, slots=True)
class Task(Generic[_Encoded]):
    """What the rest of the training asks a task for."""

    encode: Callable[[str | None, int], _Encoded]
    """Reads what `data.path` names and numbers it with a vocabulary of a size."""
    encode_by: Callable[[str, str | None, int], _Encoded]
    """Reads the first text and numbers it with the vocabulary of the second."""
    data: Callable[[_Encoded, ComparisonConfig, int], RunData]
    """The batches of the run with a seed."""
    baselines: Callable[[_Encoded, ComparisonConfig], list[Baseline]]
    """Models without a network; the first is the unigram, above which nothing was learned."""
    causal: bool
    """Whether a position sees earlier ones only."""
    num_extra_tokens: int
    """Ids after those of the vocabulary, such as the mask token."""
    units: str = "subwords"
    """What the vocabulary counts."""


def task_of(config: ComparisonConfig) -> Task[Any]:
    """Return the task of a configuration.

    Raises:
        InputError: there is none of that name.
    """
    if config.task not in TASKS:
        raise InputError(f"There is no task {config.task!r}: choose one of {', '.join(TASKS)}.")
    return TASKS[config.task]


def _encode_text(source: str | None, vocabulary_size: int) -> EncodedCorpus:
    return encode_corpus(load_corpus(source), vocabulary_size)


def _encode_text_by(source: str, other: str | None, vocabulary_size: int) -> EncodedCorpus:
    return encode_by(load_corpus(source), load_corpus(other), vocabulary_size)


def _encode_tags(source: str | None, vocabulary_size: int) -> EncodedTags:
    return encode_treebank(load_treebank(source), vocabulary_size)


def _encode_tags_by(source: str, other: str | None, vocabulary_size: int) -> EncodedTags:
    return encode_treebank_by(load_treebank(source), load_treebank(other), vocabulary_size)


def _language_model_baselines(encoded: EncodedCorpus, config: ComparisonConfig) -> list[Baseline]:
    del config
    train, valid = encoded.splits["train"].tokens, encoded.splits["valid"].tokens
    size = encoded.vocabulary_size
    unigram = baseline_metrics(UnigramModel(train, size), encoded)
    bigram = baseline_metrics(BigramModel(train, valid, size), encoded)
    return [Baseline(name="unigram", metrics=unigram), Baseline(name="bigram", metrics=bigram)]


def _masked_baselines(encoded: EncodedCorpus, config: ComparisonConfig) -> list[Baseline]:
    """The unigram at the masked positions; a bigram would see masked neighbours."""
    unigram = UnigramModel(encoded.splits["train"].tokens, encoded.vocabulary_size)
    data = MaskedSentenceData(encoded, config, seed=0)
    metrics: dict[str, float | None] = {}
    for split in ("valid", "test"):
        targets = torch.cat([batch.targets.flatten() for batch in data.evaluation(split)])
        loss = -float(unigram.probabilities(targets[targets != IGNORED]).log().mean())
        metrics[f"{split}_perplexity"] = math.exp(loss)
        metrics[f"{split}_loss"] = loss
    return [Baseline(name="unigram", metrics=metrics)]


def _tag_baselines(encoded: EncodedTags, config: ComparisonConfig) -> list[Baseline]:
    del config
    return [Baseline(name=name, metrics=found) for name, found in tag_metrics(encoded).items()]


TASKS: Final[Mapping[str, Task[Any]]] = MappingProxyType(
    {
        "lm": Task(
            _encode_text,
            _encode_text_by,
            LanguageModelData,
            _language_model_baselines,
            causal=True,
            num_extra_tokens=0,
        ),
        "mlm": Task(
            _encode_text,
            _encode_text_by,
            MaskedSentenceData,
            _masked_baselines,
            causal=False,
            num_extra_tokens=1,
        ),
        # The ids of the tags are part of the treebank's vocabulary.
        "tag": Task(
            _encode_tags,
            _encode_tags_by,
            TaggedSentenceData,
            _tag_baselines,
            causal=False,
            num_extra_tokens=0,
            units="words and tags",
        ),
    }
)
"""Tasks by the name that `ComparisonConfig.task` has."""
