"""The unigram baseline, which a network has to beat."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from powernorm_lab.data.corpus import EvaluatedSplit


class UnigramModel:
    """p(w) = (count(w) + 1) / (num_tokens + vocabulary_size).

    Args:
        tokens: the train split, int32 or int64, (num_tokens,).
        vocabulary_size: number of tokens that may occur.
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

    def metrics(self, evaluated: Mapping[EvaluatedSplit, Tensor]) -> dict[str, float | None]:
        """Return loss (nats) and perplexity of the tokens of each split."""
        metrics: dict[str, float | None] = {}
        for split, tokens in evaluated.items():
            loss = -float(self.probabilities(tokens).log().mean())
            metrics[f"{split}_loss"] = loss
            metrics[f"{split}_perplexity"] = math.exp(loss)
        return metrics
