"""What depends on the task of a comparison: its batches, its model and what has to be beaten."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from powernorm.data.baselines import BigramModel, UnigramModel, baseline_metrics
from powernorm.data.batch import IGNORED
from powernorm.data.subwords import EncodedCorpus
from powernorm.errors import InputError
from powernorm.runs import Baseline
from powernorm.training.batches import LanguageModelData, MaskedSentenceData, RunData
from powernorm.training.config import ComparisonConfig


@dataclass(frozen=True, slots=True)
class Task:
    """What the rest of the training asks a task for."""

    data: Callable[[EncodedCorpus, ComparisonConfig, int], RunData]
    """The batches of the run with a seed."""
    baselines: Callable[[EncodedCorpus, ComparisonConfig], list[Baseline]]
    """Models without a network; the first is the unigram, above which nothing was learned."""
    causal: bool
    """Whether a position sees earlier ones only."""
    num_extra_tokens: int
    """Ids after those of the subwords, such as the mask token."""


def task_of(config: ComparisonConfig) -> Task:
    """Return the task of a configuration.

    Raises:
        InputError: there is none of that name.
    """
    if config.task not in TASKS:
        raise InputError(f"There is no task {config.task!r}: choose one of {', '.join(TASKS)}.")
    return TASKS[config.task]


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


TASKS: Final[Mapping[str, Task]] = MappingProxyType(
    {
        "lm": Task(LanguageModelData, _language_model_baselines, causal=True, num_extra_tokens=0),
        "mlm": Task(MaskedSentenceData, _masked_baselines, causal=False, num_extra_tokens=1),
    }
)
"""Tasks by the name that `ComparisonConfig.task` has."""
