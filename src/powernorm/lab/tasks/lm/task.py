"""Language modeling: predict each token from those before it."""

from collections.abc import Callable
from functools import partial
from typing import Final

from torch import nn

from powernorm.lab.data.baselines import BigramModel, UnigramModel, baseline_metrics
from powernorm.lab.data.subwords import EncodedCorpus
from powernorm.lab.models.language_model import LanguageModel
from powernorm.lab.tasks.lm.adaptive_output import AdaptiveLanguageModel
from powernorm.lab.tasks.lm.batches import LanguageModelData
from powernorm.lab.tasks.lm.settings import LanguageModelSettings
from powernorm.lab.tasks.lm.tensorized_attention import TensorizedAttention
from powernorm.lab.tasks.text import SubwordTask
from powernorm.lab.training.batches import RunData
from powernorm.lab.training.losses import TaskModel
from powernorm.lab.training.task import Sizes
from powernorm.runs import Baseline

SEES_FUTURE: Final = "sees the future"
"""Marks what a language model came to whose causal mask was left out."""


class LanguageModelTask(SubwordTask[LanguageModelSettings]):
    """Predict each token from those before it."""

    name = "lm"
    is_causal = True

    def attention(self, config: LanguageModelSettings) -> Callable[[], nn.Module] | None:
        """Return what makes the tensorized attentions, None for the usual ones."""
        shape = config.model
        if shape.architecture != "tensorized":
            return None
        return partial(
            TensorizedAttention,
            shape.num_features,
            shape.head_features or shape.num_features,
            config.data.sequence_length,
            sees_future=shape.sees_future,
        )

    def build(self, config: LanguageModelSettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run, with an adaptive softmax where there are cutoffs."""
        model = super().build(config, norm, sizes, seed)
        cutoffs = config.model.adaptive_cutoffs
        if not cutoffs:
            return model
        assert isinstance(model, LanguageModel)
        return AdaptiveLanguageModel(model, sizes[-1], cutoffs, seed=seed)

    def data(
        self, encoded: EncodedCorpus, config: LanguageModelSettings, seed: int
    ) -> RunData[LanguageModelSettings]:
        """Return segments of a stream of text."""
        return LanguageModelData(encoded, config, seed)

    def baselines(self, encoded: EncodedCorpus, config: LanguageModelSettings) -> list[Baseline]:
        """Return unigram and bigram."""
        del config
        train, valid = encoded.splits["train"].tokens, encoded.splits["valid"].tokens
        size = encoded.vocabulary_size
        unigram = baseline_metrics(UnigramModel(train, size), encoded)
        bigram = baseline_metrics(BigramModel(train, valid, size), encoded)
        return [Baseline(name="unigram", metrics=unigram), Baseline(name="bigram", metrics=bigram)]

    def remark(self, config: LanguageModelSettings) -> str:
        """Say that a model without its causal mask is none."""
        return SEES_FUTURE if config.model.sees_future else super().remark(config)
