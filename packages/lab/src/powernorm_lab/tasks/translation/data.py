"""Encoded sentence pairs: the subwords, and token ids of both sides.

The ids are memory-mapped from the cache, which also stores the text of the valid and test splits:
a run is scored on the text that was encoded, even if the user's files have changed.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, Final, Literal

import tokenizers
import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.cache import Encoded, cache_key, found_or_made
from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS, EvaluatedSplit, Split
from powernorm_lab.data.subwords import END_ID, LEAST_SIZE, Subwords
from powernorm_lab.tasks.translation.readers import ParallelCorpus, TextPair
from powernorm_lab.tasks.translation.vocabulary import (
    ImportedSubwords,
    Pieces,
    TextEncoder,
    joined,
    text_encoder,
)


class TokenLists:
    """The ids of sentences; batches are gathered without a loop over the sentences.

    Args:
        flat: an end mark, then every sentence followed by an end mark, int32 or int64; it may be
            memory-mapped.
        lengths: lengths of the sentences, each with its end mark, integers.
    """

    def __init__(self, flat: Tensor, lengths: Tensor) -> None:
        self.lengths = lengths.long()
        """int64, (number of sentences,), including end marks."""
        self._flat = flat
        self._starts = self.lengths.cumsum(0) - self.lengths + 1

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int]]) -> "TokenLists":
        """Concatenate lists of ids, which have no end marks."""
        rows = list(lists)
        flat = chain([END_ID], *([*row, END_ID] for row in rows))
        return cls(
            torch.tensor(list(flat), dtype=torch.int32),
            torch.tensor([len(row) + 1 for row in rows], dtype=torch.int64),
        )

    def __len__(self) -> int:
        """Return the number of sentences."""
        return self.lengths.numel()

    @property
    def tokens(self) -> Tensor:
        """Return all sentences as one stream, each followed by the end mark, (num_tokens,)."""
        return self._flat[1:]

    def row(self, index: int) -> Tensor:
        """Return the ids of a sentence with its end mark, (length,)."""
        start = int(self._starts[index])
        return self._flat[start : start + int(self.lengths[index])]

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return sentences, each with its end mark, and their padding mask.

        Args:
            rows: numbers of at least one sentence, int64, (batch,).

        Returns:
            Ids, int64, 0 at padding, and a mask, bool, True = padding, both (batch, length of the
            longest); the mask is None without padding.
        """
        return self._gathered(rows, 0)

    def shifted(self, rows: Tensor) -> Tensor:
        """Return the ids of `padded`, with the end mark before instead of after each sentence."""
        return self._gathered(rows, -1)[0]

    def _gathered(self, rows: Tensor, shift: int) -> tuple[Tensor, Tensor | None]:
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()))
        padding = positions >= lengths[:, None]
        places = self._starts[rows][:, None] + positions + shift
        # Index 0 at padding: positions after the last sentence would be out of range.
        ids = self._flat[places.masked_fill_(padding, 0)].long()
        return ids.masked_fill_(padding, END_ID), padding if padding.any() else None


@dataclass(frozen=True)
class EncodedPairSplit:
    """The encoded sentence pairs of a split."""

    source: TokenLists
    target: TokenLists

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.source)


# The encoding of a corpus.


TOO_LONG: Final = "too long"
LENGTH_RATIO: Final = "length ratio"
"""Reasons for leaving out a training pair."""
PORTION: Final = 4096
"""Number of pairs that are encoded at a time."""
_FORMAT: Final = 2
Side = Literal["source", "target"]
SIDES: Final[tuple[Side, ...]] = ("source", "target")


@dataclass(frozen=True)
class PairOptions:
    """Settings of the encoding of sentence pairs."""

    vocabulary_size: int | None
    """Number of subwords of both languages together, or of the source language; None if they are
    not learned."""
    target_vocabulary_size: int | None = None
    """Number of subwords of a separate target vocabulary; None is one vocabulary for both."""
    max_length: int = 256
    """Maximal number of subwords of a side, including the end mark. Longer training pairs are left
    out; longer sides of the other splits are truncated."""
    max_length_ratio: float | None = None
    """Training pairs whose lengths differ by more than this factor are left out; None keeps all."""
    max_pairs: int | None = None
    """Number of evenly spaced training pairs to use; None is all."""

    def __post_init__(self) -> None:
        for size in (self.vocabulary_size, self.target_vocabulary_size):
            if size is not None and size < LEAST_SIZE:
                raise InputError(
                    f"a vocabulary of {size} subwords is too small: give at least {LEAST_SIZE}, "
                    "for every byte and the end mark"
                )
        if self.max_length < 2:
            raise InputError(
                f"max_length={self.max_length} leaves room for no subword: give 2 or more"
            )
        if self.max_length_ratio is not None and not self.max_length_ratio >= 1:
            raise InputError(f"max_length_ratio={self.max_length_ratio} must be 1 or more")
        if self.max_pairs is not None and self.max_pairs < 1:
            raise InputError(f"max_pairs={self.max_pairs} must be 1 or more")


@dataclass(frozen=True)
class EncodedPairs:
    """A corpus of sentence pairs, encoded with subwords."""

    corpus: ParallelCorpus
    source_subwords: TextEncoder
    target_subwords: TextEncoder
    """The same object if both languages share their subwords."""
    splits: dict[Split, EncodedPairSplit]
    fingerprint: str
    """A hash of everything that determines the ids."""
    dropped: Mapping[Split, Mapping[str, int]]
    """Numbers of left-out pairs, by reason."""
    cut: Mapping[Split, Mapping[str, int]]
    """Numbers of truncated sentences, by side."""
    num_words: Mapping[Split, Mapping[str, int]]
    """Numbers of words in the kept pairs, by side."""
    _texts: Mapping[EvaluatedSplit, list[TextPair]] = field(repr=False)
    """Texts in memory, since the user's files and the cache may change before a run is scored."""

    @property
    def vocabulary_size(self) -> int:
        """Return the number of subwords of the source."""
        return self.source_subwords.size

    @property
    def target_vocabulary_size(self) -> int:
        """Return the number of subwords of the target."""
        return self.target_subwords.size

    def sources(self, split: EvaluatedSplit) -> list[str]:
        """Return the source sentences of a split, as they were encoded."""
        return [source for source, _ in self._texts[split]]

    def references(self, split: EvaluatedSplit) -> list[str]:
        """Return the reference translations of a split, as they were encoded."""
        return [target for _, target in self._texts[split]]

    def facts(self) -> dict[str, Any]:
        """Return name, source, license and sizes of the data as JSON values, for results."""
        return {
            "name": self.corpus.name,
            "source": self.corpus.source,
            "licence": self.corpus.license,
            "languages": self.corpus.languages,
            "tokenised": self.corpus.tokenized,
            "joint_vocabulary": self.source_subwords is self.target_subwords,
            "vocabulary_size": self.vocabulary_size,
            "target_vocabulary_size": self.target_vocabulary_size,
            "splits": {split: self._split_facts(split) for split in SPLITS},
        }

    def _split_facts(self, split: Split) -> dict[str, Any]:
        part = self.splits[split]
        return {
            "pairs": len(part),
            "source_words": self.num_words[split]["source"],
            "target_words": self.num_words[split]["target"],
            "source_subwords": int(part.source.lengths.sum()) - len(part),
            "target_subwords": int(part.target.lengths.sum()) - len(part),
            "dropped": dict(self.dropped[split]),
            "cut": dict(self.cut[split]),
        }


def encode_pairs(
    corpus: ParallelCorpus,
    config: PairOptions,
    subwords: tuple[TextEncoder, TextEncoder] | None = None,
    *,
    imported: ImportedSubwords | None = None,
) -> EncodedPairs:
    """Train byte-pair subwords on the train split and encode all splits, or load the cached result.

    The subwords are trained on the pairs that `max_pairs` selects, before the filters of length.
    All pairs of the valid and test splits are kept; a side that is longer than `max_length` is
    truncated, which does not change the references of scores.

    Args:
        corpus: the corpus, iterated up to four times; its text is never in memory as a whole.
        config: sizes and filters.
        subwords: subwords of source and target of a trained model; None trains them.
        imported: existing subwords in place of trained ones.

    Raises:
        InputError: the corpus is damaged, a split has no pairs, or the filters leave none.
    """
    known = None if subwords is None else [part.to_json() for part in subwords]
    key = cache_key(
        format=_FORMAT,
        task="translation",
        text=corpus.fingerprint(),
        tokenizers=tokenizers.__version__,
        subwords=known,
        **asdict(config),
        **({} if imported is None else {"imported": imported.fingerprint}),
    )

    def find(text: _TrainingText) -> tuple[TextEncoder, TextEncoder]:
        if subwords is not None:
            return subwords
        return _train(text, config) if imported is None else imported.encoders(text)

    made = found_or_made(f"{key}.pairs", lambda: _make(corpus, config, find))
    return _opened(corpus, key, made)


def _opened(corpus: ParallelCorpus, key: str, made: Encoded) -> EncodedPairs:
    source = target = text_encoder(made.texts["source"])
    if "target" in made.texts:
        target = text_encoder(made.texts["target"])
    facts = json.loads(made.texts["facts"])
    return EncodedPairs(
        corpus=corpus,
        source_subwords=source,
        target_subwords=target,
        splits={split: _pair_split(made.tensors, split) for split in SPLITS},
        fingerprint=key,
        dropped={split: facts[split]["dropped"] for split in SPLITS},
        cut={split: facts[split]["cut"] for split in SPLITS},
        num_words={split: facts[split]["words"] for split in SPLITS},
        _texts={
            split: [
                (source, target)
                for source, target in json.loads(made.tensors[f"{split}.text"].numpy().tobytes())
            ]
            for split in EVALUATED_SPLITS
        },
    )


def _pair_split(tensors: Mapping[str, Tensor], split: Split) -> EncodedPairSplit:
    return EncodedPairSplit(
        *(
            TokenLists(tensors[f"{split}.{side}.ids"], tensors[f"{split}.{side}.lengths"])
            for side in SIDES
        )
    )


def _make(
    corpus: ParallelCorpus,
    config: PairOptions,
    find: Callable[["_TrainingText"], tuple[TextEncoder, TextEncoder]],
) -> Encoded:
    """Encode all splits, a portion of the text at a time."""
    train = _TrainingText(corpus, config.max_pairs)
    source, target = find(train)
    texts = {"source": source.to_json()}
    if target is not source:
        texts["target"] = target.to_json()
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for split in SPLITS:
        encoder = _Encoder(corpus, (source, target), config, is_train=split == "train")
        kept: list[TextPair] = []
        for portion in _portions(train if split == "train" else corpus.pairs(split)):
            encoder.add(portion)
            if split != "train":
                kept += _as_words(portion, corpus)
        if not encoder.num_pairs:
            raise InputError(
                f"no training pair of {corpus.source} is within the limits of length "
                f"(data.sequence_length={config.max_length}, "
                f"data.max_length_ratio={config.max_length_ratio}): "
                "raise them"
            )
        facts[split] = encoder.facts(corpus.num_dropped[split])
        text = bytearray(json.dumps(kept).encode())
        tensors[f"{split}.text"] = torch.frombuffer(text, dtype=torch.uint8)
        for name, values in encoder.ids.items():
            tensors[f"{split}.{name}"] = torch.frombuffer(values, dtype=torch.int32)
    return Encoded(tensors, {**texts, "facts": json.dumps(facts)})


class _TrainingText:
    """The selected training pairs, as a reusable iterable."""

    def __init__(self, corpus: ParallelCorpus, max_pairs: int | None) -> None:
        self.corpus = corpus
        self._max_pairs = max_pairs
        self._total = 0 if max_pairs is None else sum(1 for _ in corpus.pairs("train"))

    def __iter__(self) -> Iterator[TextPair]:
        if self._max_pairs is None:
            yield from self.corpus.pairs("train")
            return
        kept = min(self._total, self._max_pairs)
        number = 0
        for index, pair in enumerate(self.corpus.pairs("train")):
            if number < kept and index == number * self._total // kept:
                number += 1
                yield pair


def _train(text: _TrainingText, config: PairOptions) -> tuple[Subwords, Subwords]:
    tokenized = text.corpus.tokenized
    size, target_size = config.vocabulary_size, config.target_vocabulary_size
    assert size is not None
    if target_size is None:
        joint = Subwords.train(chain.from_iterable(text), size, tokenized=tokenized)
        return joint, joint
    sources = (source for source, _ in text)
    targets = (target for _, target in text)
    return (
        Subwords.train(sources, size, tokenized=tokenized),
        Subwords.train(targets, target_size, tokenized=tokenized),
    )


class _Encoder:
    """Encodes pairs, leaves out or truncates long ones, and counts them."""

    def __init__(
        self,
        corpus: ParallelCorpus,
        subwords: tuple[TextEncoder, TextEncoder],
        config: PairOptions,
        *,
        is_train: bool,
    ) -> None:
        self._corpus = corpus
        self._encode = {
            side: part.encode_split if corpus.is_split and isinstance(part, Pieces) else part.encode
            for side, part in zip(SIDES, subwords, strict=True)
        }
        self._max_words = config.max_length - 1
        self._max_ratio = config.max_length_ratio
        self._is_train = is_train
        self.num_pairs = 0
        self.ids = {f"{side}.lengths": array("i") for side in SIDES}
        """Ids and lengths by side, concatenated as in `TokenLists`."""
        self.ids |= {f"{side}.ids": array("i", [END_ID]) for side in SIDES}
        self._dropped = {TOO_LONG: 0, LENGTH_RATIO: 0}
        self._cut = dict.fromkeys(SIDES, 0)
        self._words = dict.fromkeys(SIDES, 0)

    def add(self, pairs: list[TextPair]) -> None:
        """Encode pairs and append those that are kept."""
        ids = {
            side: self._encode[side]([pair[place] for pair in pairs])
            for place, side in enumerate(SIDES)
        }
        kept = list(range(len(pairs)))
        if self._is_train:
            lengths = ([len(row) for row in ids[side]] for side in SIDES)
            kept = [n for n, sizes in enumerate(zip(*lengths, strict=True)) if self._fits(*sizes)]
        words = _as_words(pairs, self._corpus)
        for place, side in enumerate(SIDES):
            rows = [ids[side][number] for number in kept]
            self._cut[side] += sum(len(row) > self._max_words for row in rows)
            self._words[side] += sum(len(words[number][place].split()) for number in kept)
            for row in rows:
                self.ids[f"{side}.ids"].extend((*row[: self._max_words], END_ID))
                self.ids[f"{side}.lengths"].append(min(len(row), self._max_words) + 1)
        self.num_pairs += len(kept)

    def facts(self, dropped: Mapping[str, int]) -> dict[str, Any]:
        """Return the counts, including pairs that the corpus has left out."""
        every = {**dropped, **(self._dropped if self._is_train else {})}
        return {"dropped": every, "cut": self._cut, "words": self._words}

    def _fits(self, source: int, target: int) -> bool:
        longer, shorter = max(source, target), min(source, target)
        if longer > self._max_words:
            self._dropped[TOO_LONG] += 1
            return False
        if self._max_ratio is not None and longer > self._max_ratio * shorter:
            self._dropped[LENGTH_RATIO] += 1
            return False
        return True


def _as_words(pairs: list[TextPair], corpus: ParallelCorpus) -> list[TextPair]:
    """Return pairs with subwords joined to words."""
    if not corpus.is_split:
        return pairs
    return [(joined(source), joined(target)) for source, target in pairs]


def _portions(pairs: Iterable[TextPair]) -> Iterator[list[TextPair]]:
    remaining = iter(pairs)
    while portion := list(islice(remaining, PORTION)):
        yield portion
