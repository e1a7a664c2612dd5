"""The language modeling task: predict each token from those before it."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm_lab.data.baselines import UnigramModel
from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS, Split
from powernorm_lab.data.readers import load_corpus
from powernorm_lab.data.subwords import (
    END_ID,
    EncodedCorpus,
    Subwords,
    Words,
    encode_corpus,
)
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.lm.data import LanguageModelData
from powernorm_lab.tasks.lm.model import AdaptiveLanguageModel, LanguageModel, TensorizedAttention
from powernorm_lab.tasks.lm.settings import LanguageModelSettings
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import UPPER_NORM, norm_factory, qk_norm_factory
from powernorm_lab.training.task import BuiltinTask, Sizes

SEES_FUTURE: Final = "sees the future"
"""Remark on results of a language model without a causal mask."""


class LanguageModelTask(BuiltinTask[EncodedCorpus, LanguageModelSettings]):
    """Language modeling with a Transformer."""

    name = "lm"
    data = LanguageModelData

    def encode(self, config: LanguageModelSettings, source: str | None = None) -> EncodedCorpus:
        """Read and encode a text; `source` with the vocabulary of `data.path`."""
        data = config.data
        own = load_corpus(data.path)
        kind = Words if data.vocabulary == "words" else Subwords
        if source is None:
            return encode_corpus(own, data.vocabulary_size, kind)
        return encode_corpus(load_corpus(source), data.vocabulary_size, kind, by=own)

    def facts(self, encoded: EncodedCorpus) -> dict[str, Any]:
        """Return name, source, license and sizes of the text."""
        corpus = encoded.corpus
        return {
            "name": corpus.name,
            "source": corpus.source,
            "licence": corpus.license,
            "vocabulary_size": encoded.vocabulary_size,
            "splits": {
                split: {
                    "documents": len(corpus.documents[split]),
                    "words": encoded.splits[split].num_words,
                    "tokens": encoded.splits[split].num_tokens,
                    **_unknown(encoded, split),
                }
                for split in SPLITS
            },
        }

    def summary(self, encoded: EncodedCorpus) -> DataPrepared:
        """Return the event that describes the data."""
        num_words = encoded.splits["train"].num_words
        return DataPrepared(encoded.corpus.name, num_words, "words", encoded.vocabulary_size)

    def sizes(self, encoded: EncodedCorpus) -> Sizes:
        """Return the number of ids."""
        return (encoded.vocabulary_size,)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the number of ids from the weights of a model."""
        # An adaptive softmax wraps the model.
        name = "embedding.weight"
        return (len(weights[name] if name in weights else weights[f"model.{name}"]),)

    def build(self, config: LanguageModelSettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run, with an adaptive softmax if there are cutoffs.

        Models of equal seeds have equal weights for all norms.

        Raises:
            InputError: the norm is unknown, or its options do not fit it or the model.
        """
        model = LanguageModel(
            sizes[-1],
            norm_factory(norm, options_of(config, norm)),
            config.model.shape,
            max_length=config.data.sequence_length,
            seed=seed,
            upper_norm=norm_factory(UPPER_NORM),
            attention=self._attention(config),
            qk_norm=qk_norm_factory(config),
        )
        cutoffs = config.model.adaptive_cutoffs
        if not cutoffs:
            return model
        return AdaptiveLanguageModel(model, sizes[-1], cutoffs, seed=seed)

    def _attention(self, config: LanguageModelSettings) -> Callable[[], nn.Module] | None:
        """Return a function that builds the tensorized attentions; None for plain attention."""
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

    def example_inputs(self, config: LanguageModelSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return random tokens, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        return (torch.randint(sizes[-1], shape, generator=generator),)

    def baselines(self, encoded: EncodedCorpus, config: LanguageModelSettings) -> list[Baseline]:
        """Return the scores of a unigram and a bigram model."""
        del config
        train, valid = encoded.splits["train"].tokens, encoded.splits["valid"].tokens
        size = encoded.vocabulary_size
        unigram = baseline_metrics(UnigramModel(train, size), encoded)
        bigram = baseline_metrics(BigramModel(train, valid, size), encoded)
        return [Baseline(name="unigram", metrics=unigram), Baseline(name="bigram", metrics=bigram)]

    def remark(self, config: LanguageModelSettings) -> str:
        """Return a remark for a model without a causal mask."""
        return SEES_FUTURE if config.model.sees_future else super().remark(config)


def _unknown(encoded: EncodedCorpus, split: Split) -> dict[str, int]:
    """Return the number of unknown words of a split; empty for subwords, which have none."""
    if encoded.unknown_id is None:
        return {}
    return {"unknown": int((encoded.splits[split].tokens == encoded.unknown_id).sum())}


# Baselines.


NUM_WEIGHT_STEPS: Final = 100


class BigramModel:
    """p(w | v) = weight · count(v w) / count(v) + (1 - weight) · p(w).

    After a `v` that never occurred in training, the probability is p(w). The weight maximizes the
    likelihood of the valid split, by expectation maximization; the log-likelihood is concave in the
    weight, so that there is no other maximum.

    Args:
        train: the train split, int32 or int64, (num_tokens,).
        valid: the valid split, int32 or int64, (num_tokens,).
        vocabulary_size: number of subwords.
    """

    def __init__(self, train: Tensor, valid: Tensor, vocabulary_size: int) -> None:
        self._size = vocabulary_size
        self._unigram = UnigramModel(train, vocabulary_size)
        pairs = _pairs(train, vocabulary_size)
        self._pairs, self._pair_counts = torch.unique(pairs, return_counts=True)
        self._context_counts = torch.bincount(pairs // vocabulary_size, minlength=vocabulary_size)
        self.weight = self._fit_weight(valid)

    def probabilities(self, tokens: Tensor) -> Tensor:
        """Return p of every token after the one before it, float64, (num_tokens,)."""
        relative, single, seen = self._parts(tokens)
        return torch.where(seen, self.weight * relative + (1 - self.weight) * single, single)

    def _parts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return count(v w) / count(v), p(w), and whether v was seen."""
        pairs = _pairs(tokens, self._size)
        index = torch.searchsorted(self._pairs, pairs).clamp_(max=self._pairs.numel() - 1)
        counts = self._pair_counts[index].where(self._pairs[index] == pairs, 0)
        contexts = self._context_counts[pairs // self._size]
        relative = counts.double() / contexts.clamp(min=1)
        return relative, self._unigram.probabilities(tokens), contexts > 0

    def _fit_weight(self, tokens: Tensor) -> float:
        relative, single, seen = self._parts(tokens)
        relative, single = relative[seen], single[seen]
        if not relative.numel():
            return 0.0
        weight = torch.tensor(0.5, dtype=torch.float64)
        for _ in range(NUM_WEIGHT_STEPS):
            from_pairs = weight * relative
            weight = (from_pairs / (from_pairs + (1 - weight) * single)).mean()
        return float(weight)


def baseline_metrics(
    model: UnigramModel | BigramModel, encoded: EncodedCorpus
) -> dict[str, float | None]:
    """Return loss (nats per token) and perplexity (per word) of the valid and test splits."""
    metrics: dict[str, float | None] = {}
    for split in EVALUATED_SPLITS:
        part = encoded.splits[split]
        nll = -float(model.probabilities(part.tokens).log().sum())
        nats_per_word = nll / part.num_words
        # Text of very long "words" has a perplexity beyond float64; JSON has no infinity.
        metrics[f"{split}_perplexity"] = math.exp(nats_per_word) if nats_per_word < 700 else None
        metrics[f"{split}_loss"] = nll / part.num_tokens
    return metrics


def _pairs(tokens: Tensor, vocabulary_size: int) -> Tensor:
    """Number each (token before, token) pair; the first token follows the end mark."""
    before = torch.cat([tokens.new_tensor([END_ID]), tokens[:-1]]).long()
    return before * vocabulary_size + tokens
