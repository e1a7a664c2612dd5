"""Encoded texts, with ids of words and classes, and their padded batches."""

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import MASK, Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.cache import cache_key
from powernorm_lab.data.corpus import SPLITS, EvaluatedSplit, Split
from powernorm_lab.data.orders import LengthGroups, Order, WithinBudget, spaced, spaced_by_tokens
from powernorm_lab.data.rows import PaddedRows
from powernorm_lab.tasks.classify.readers import LabeledText, LabeledTexts
from powernorm_lab.tasks.classify.settings import ClassificationSettings
from powernorm_lab.training.batches import RowData

UNKNOWN_ID: Final = 1
"""Id of words that are not in the vocabulary; 0 is padding."""
NUM_MARKS: Final = 2
_WORD: Final = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|re|ve|ll|d|m)\b|\w+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case.

    A word is a sequence of letters, digits and underscores; every other character is a separate
    word. English contractions are split as in the Penn Treebank, so that tokenized texts (RT,
    SST-5) and others are treated in the same way.

    >>> words_of("It isn't Jackson's best-known film.")
    ['it', 'is', "n't", 'jackson', "'s", 'best', '-', 'known', 'film', '.']
    """
    return _WORD.findall(text.lower())


class WordVocabulary:
    """The ids of words, sorted by frequency, then alphabetically.

    Args:
        counts: number of occurrences of each word in the train split.
        size: maximal number of ids, including padding and the unknown word.
    """

    def __init__(self, counts: Counter[str], size: int) -> None:
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - NUM_MARKS]
        self._ids = {word: index for index, word in enumerate(ranked, start=NUM_MARKS)}

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._ids) + NUM_MARKS

    @property
    def words(self) -> Sequence[str]:
        """Return the words in the order of their ids."""
        return list(self._ids)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of words."""
        return [self._ids.get(word, UNKNOWN_ID) for word in words]


_FORMAT: Final = 1


@dataclass(frozen=True, eq=False)
class EncodedTextSplit:
    """The encoded texts of a split."""

    words: Tensor
    """int32, (number of words,): the concatenated texts."""
    lengths: Tensor
    """int64, (number of texts,), at least 1."""
    labels: Tensor
    """int64, (number of texts,)."""

    def __len__(self) -> int:
        """Return the number of texts."""
        return self.lengths.numel()

    def texts(self) -> tuple[Tensor, ...]:
        """Return the ids of the words of each text, int32, (length,)."""
        texts: tuple[Tensor, ...] = self.words.split(self.lengths.tolist())
        return texts

    def chosen(self, rows: Tensor) -> "EncodedTextSplit":
        """Return some of the texts.

        Args:
            rows: numbers of the texts, int64, (rows,).
        """
        texts = self.texts()
        kept = torch.cat([texts[row] for row in rows.tolist()])
        return EncodedTextSplit(kept, self.lengths[rows], self.labels[rows])


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """An encoded data set."""

    texts: LabeledTexts
    splits: Mapping[Split, EncodedTextSplit]
    num_cut: Mapping[Split, int]
    """Numbers of truncated texts."""
    vocabulary: WordVocabulary
    labels: tuple[str, ...]
    """The classes in the order of their ids."""
    fingerprint: str
    """A hash of everything that determines the ids."""


def encode_texts(
    texts: LabeledTexts,
    *,
    vocabulary_size: int,
    max_length: int,
    max_examples: int | None = None,
    by: LabeledTexts | None = None,
) -> EncodedTexts:
    """Encode the words and classes of a data set, without a cache.

    The vocabulary has the most frequent words of the train split in lower case (`words_of`); all
    others are unknown. A text without words becomes one unknown word. The files of the train split
    are read twice, those of the others once, and only ids are kept.

    Args:
        texts: the data set.
        vocabulary_size: number of ids of words, including padding and the unknown word.
        max_length: maximal number of words of a text; longer texts are truncated.
        max_examples: number of evenly spaced training texts to use; None is all.
        by: data set that defines words and classes, such as that of a trained model; None is
            `texts`.

    Raises:
        InputError: a file is damaged, a split has no texts, the train split of `by` has a single
            class, or a class is not in it.
    """
    counts, labels = _counted(by or texts)
    vocabulary = WordVocabulary(counts, vocabulary_size)
    digest = hashlib.sha256("\n".join([*vocabulary.words, "", *labels]).encode())
    splits: dict[Split, EncodedTextSplit] = {}
    num_cut: dict[Split, int] = {}
    for split in SPLITS:
        whole, num_cut[split] = _encoded_split(texts, split, vocabulary, labels, max_length)
        if split == "train" and max_examples is not None and max_examples < len(whole):
            whole = whole.chosen(spaced(len(whole), max_examples))
        splits[split] = whole
        for part in (whole.words, whole.lengths, whole.labels):
            digest.update(part.numpy().tobytes())
    fingerprint = cache_key(
        format=_FORMAT, task="classify", ids=digest.hexdigest(), max_length=max_length
    )
    return EncodedTexts(texts, splits, num_cut, vocabulary, labels, fingerprint)


def _counted(texts: LabeledTexts) -> tuple[Counter[str], tuple[str, ...]]:
    """Return the counts of words in the train split, and the classes."""
    counts: Counter[str] = Counter()
    found: set[str] = set()
    for row in texts.read["train"]():
        counts.update(words_of(row.text))
        found.add(row.label)
    labels = texts.labels or tuple(sorted(found))
    if len(found) < 2:
        only = f"only the class {next(iter(found))!r}" if found else "no texts"
        raise InputError(
            f"the train split of {texts.source} has {only}: expected texts of at least two classes"
        )
    return counts, labels


def _encoded_split(
    texts: LabeledTexts,
    split: Split,
    vocabulary: WordVocabulary,
    labels: tuple[str, ...],
    max_length: int,
) -> tuple[EncodedTextSplit, int]:
    """Return an encoded split, and its number of truncated texts."""
    ids = {label: index for index, label in enumerate(labels)}
    words, lengths, classes, num_cut = array("i"), array("q"), array("q"), 0
    for row in _known(texts.read[split](), ids):
        own = vocabulary.encode(words_of(row.text)) or [UNKNOWN_ID]
        num_cut += len(own) > max_length
        own = own[:max_length]
        words.extend(own)
        lengths.append(len(own))
        classes.append(ids[row.label])
    if not lengths:
        raise InputError(f"the {split} split of {texts.source} has no texts: give some")
    encoded = EncodedTextSplit(
        torch.frombuffer(words, dtype=torch.int32),
        torch.frombuffer(lengths, dtype=torch.int64),
        torch.frombuffer(classes, dtype=torch.int64),
    )
    return encoded, num_cut


def _known(rows: Iterator[LabeledText], ids: Mapping[str, int]) -> Iterator[LabeledText]:
    for row in rows:
        if row.label not in ids:
            shown = ", ".join(list(ids)[:20])
            raise InputError(
                f"{row.place}: the class {row.label[:40]!r} is not one of the train split: "
                f"expected one of {shown}"
            )
        yield row


# Batches.


PADDING_ID: Final = 0


class TextRows(PaddedRows):
    """The texts of a split.

    With `batch_tokens`, a batch has texts of similar length; without it, `batch_size` random texts.

    Args:
        split: the encoded split.
        batch_tokens: maximal number of positions of a batch, including padding; a longer text is a
            batch by itself.
    """

    unit = "texts"

    def __init__(self, split: EncodedTextSplit, *, batch_tokens: int | None = None) -> None:
        super().__init__(split.lengths)
        self._split = split
        self._batch_tokens = batch_tokens

    def batch(self, rows: Tensor) -> Batch:
        """Return a batch of texts by number, padded to the longest."""
        places, padding = self.places(rows)
        words = self._split.words[places].long().masked_fill_(padding, PADDING_ID)
        return Batch(
            named={"tokens": words, MASK: padding},
            targets=self._split.labels[rows],
            num_tokens=int(self.lengths[rows].sum()),
            num_targets=rows.numel(),
        )

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the order of texts in training."""
        if self._batch_tokens is None:
            return super().order(batch_size=batch_size, seed=seed)
        return WithinBudget(_groups(self.lengths, self._batch_tokens), seed=seed)

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run; all texts of an update have equal weight."""
        order = self.order(batch_size=batch_size, seed=seed)
        if self._batch_tokens is None:
            num_tokens = float(self.lengths.double().mean()) * batch_size
        else:
            num_tokens = float(self.lengths.sum()) / order.batches_per_epoch
        return TrainingBatches(
            order,
            lambda rows, _: self.batch(rows),
            tokens_per_batch=num_tokens,
            num_targets=len,
            batches_per_update=batches_per_update,
        )

    def evaluation(self, *, batch_size: int, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of an evaluation, the shortest texts first."""
        chosen = spaced_by_tokens(self.lengths, max_tokens)
        lengths = self.lengths[chosen]
        if self._batch_tokens is None:
            parts = lengths.argsort(stable=True).split(batch_size)
        else:
            parts = _groups(lengths, self._batch_tokens).batches()
        return EvaluationBatches([chosen[part] for part in parts], lambda rows, _: self.batch(rows))


def _groups(lengths: Tensor, batch_tokens: int) -> LengthGroups:
    return LengthGroups(lengths, lengths, batch_tokens=batch_tokens)


class ClassifiedTextData(RowData[EncodedTexts, ClassificationSettings]):
    """Batches of padded texts with classes."""

    def rows(self, split: Split) -> TextRows:
        """Return the texts of a split."""
        batch_tokens = self._config.data.batch_tokens
        return TextRows(self._encoded.splits[split], batch_tokens=batch_tokens)

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return the accuracy in percent."""
        del brief
        return {"accuracy": self.accuracy(split, model, device)}
