"""Baselines from counts, which a network has to beat.

Unigram and interpolated bigram models of subwords, and tags of words without context.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from powernorm_lab.data.subwords import END_ID, EncodedCorpus

NUM_WEIGHT_STEPS: Final = 100


class UnigramModel:
    """p(w) = (count(w) + 1) / (num_tokens + vocabulary_size).

    Args:
        tokens: the train split, int32 or int64, (num_tokens,).
        vocabulary_size: number of subwords.
    """

    def __init__(self, tokens: Tensor, vocabulary_size: int) -> None:
        counts = torch.bincount(tokens, minlength=vocabulary_size).double() + 1
        self._probabilities = counts / counts.sum()

    def probabilities(self, tokens: Tensor) -> Tensor:
        """Return p of every token, float64, (num_tokens,)."""
        return self._probabilities[tokens]

    @property
    def most_frequent(self) -> Tensor:
        """Return the most probable token, 0-d."""
        return self._probabilities.argmax()

    def metrics(self, evaluated: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Return loss (nats) and perplexity of the tokens of each split."""
        metrics: dict[str, float | None] = {}
        for split, tokens in evaluated.items():
            loss = -float(self.probabilities(tokens).log().mean())
            metrics[f"{split}_loss"] = loss
            metrics[f"{split}_perplexity"] = math.exp(loss)
        return metrics


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


class WordTagModel:
    """p(tag | word) = (count(word, tag) + p(tag)) / (count(word) + 1), without context.

    Args:
        words: ids of the train split, int64, (num_words,).
        tags: tag of each word, from 0, int64, (num_words,).
        num_word_ids: number of distinct words.
        num_tags: number of distinct tags.
    """

    def __init__(self, words: Tensor, tags: Tensor, num_word_ids: int, num_tags: int) -> None:
        pairs = torch.bincount(words * num_tags + tags, minlength=num_word_ids * num_tags)
        counts = pairs.reshape(num_word_ids, num_tags).double()
        prior = UnigramModel(tags, num_tags).probabilities(torch.arange(num_tags))
        self._probabilities = (counts + prior) / (counts.sum(dim=1, keepdim=True) + 1)

    def probabilities(self, words: Tensor, tags: Tensor) -> Tensor:
        """Return p of every word's tag, float64, (num_words,)."""
        return self._probabilities[words, tags]


def baseline_metrics(
    model: UnigramModel | BigramModel, encoded: EncodedCorpus
) -> dict[str, float | None]:
    """Return loss (nats per token) and perplexity (per word) of the valid and test splits."""
    metrics: dict[str, float | None] = {}
    for split in ("valid", "test"):
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
