"""Baselines: class frequencies, and naive Bayes over the words of a text."""

from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm_lab.data.corpus import Split
from powernorm_lab.tasks.classify.encoded_texts import EncodedTexts, EncodedTextSplit

TextBaseline = Literal["unigram", "naive_bayes"]
_EVALUATED: Final[tuple[Split, ...]] = ("valid", "test")


class NaiveBayes:
    """p(class | text) ∝ p(class) Π p(word | class) over the distinct words of the text.

    Each word counts once in a text: p(word | class) = (texts of the class with it + 1) / (the same
    summed over all words). The model is overconfident, because words are not independent: its
    accuracy is meaningful, its loss is not.

    Args:
        split: training texts.
        num_words: number of ids of words.
        num_classes: number of classes.
    """

    def __init__(self, split: EncodedTextSplit, num_words: int, num_classes: int) -> None:
        self._num_words = num_words
        texts, words = self._pairs(split)
        places = split.labels[texts] * num_words + words
        counts = torch.bincount(places, minlength=num_classes * num_words).double() + 1
        table = counts.view(num_classes, num_words)
        self._log_words = (table / table.sum(1, keepdim=True)).log().T.contiguous()
        self._log_prior = _class_probabilities(split, num_classes).log()

    def log_probabilities(self, split: EncodedTextSplit) -> Tensor:
        """Return log p of the classes of each text, float64, (number of texts, classes)."""
        texts, words = self._pairs(split)
        scores = self._log_prior.repeat(len(split), 1)
        scores.index_add_(0, texts, self._log_words[words])
        return scores.log_softmax(dim=1)

    def _pairs(self, split: EncodedTextSplit) -> tuple[Tensor, Tensor]:
        """Return the distinct pairs of texts and words."""
        texts = torch.arange(len(split)).repeat_interleave(split.lengths)
        pairs = torch.unique(texts * self._num_words + split.words)
        return pairs // self._num_words, pairs % self._num_words


def _class_probabilities(split: EncodedTextSplit, num_classes: int) -> Tensor:
    """Return (texts of the class + 1) / (texts + classes), float64, (classes,)."""
    counts = torch.bincount(split.labels, minlength=num_classes).double() + 1
    return counts / counts.sum()


def text_baselines(encoded: EncodedTexts) -> dict[TextBaseline, dict[str, float | None]]:
    """Return loss (nats per text) and accuracy (percent) of the valid and test splits."""
    train, num_classes = encoded.splits["train"], len(encoded.labels)
    bayes = NaiveBayes(train, len(encoded.vocabulary), num_classes)
    prior = _class_probabilities(train, num_classes).log()
    found: dict[TextBaseline, dict[str, float | None]] = {"unigram": {}, "naive_bayes": {}}
    for split in _EVALUATED:
        part = encoded.splits[split]
        found["unigram"] |= _metrics(split, prior.expand(len(part), -1), part.labels)
        found["naive_bayes"] |= _metrics(split, bayes.log_probabilities(part), part.labels)
    return found


def _metrics(split: Split, log_probabilities: Tensor, labels: Tensor) -> dict[str, float | None]:
    right = (log_probabilities.argmax(dim=1) == labels).double().mean()
    return {
        f"{split}_loss": float(F.nll_loss(log_probabilities, labels)),
        f"{split}_accuracy": 100 * float(right),
    }
