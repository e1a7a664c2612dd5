"""Tokenization by byte-pair subwords or words, and encoded corpora with a cache."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.cache import Encoded, cache_key, found_or_made
from powernorm_lab.data.corpus import SPLITS, Corpus, Split

END: Final = "<eos>"
"""End mark: follows every document, and precedes the first one."""
END_ID: Final = 0
UNKNOWN: Final = "<unk>"
"""Replaces words that are not in a vocabulary of words."""
UNKNOWN_ID: Final = 1
_NO_WORD: Final = ""
"""Key of the end mark's id, so that no word, not even "<eos>", is encoded as the end mark."""
CACHE_FORMAT: Final = 1
PORTION: Final = 4096
"""Number of documents that are encoded at a time."""
LEAST_SIZE: Final = 257
"""Minimal size of a vocabulary: every byte and the end mark."""


class Subwords:
    """Byte-pair subwords of one language, or of two together.

    Words are joined by single spaces, since the kind of white space is not modeled. Every string
    can be encoded, since each byte is a subword. The id `END_ID` is the end mark; no text is
    encoded as it.

    >>> subwords = Subwords.train(["no man is an island"], 260, tokenized=False)
    >>> subwords.decode(subwords.encode(["an  île"]))
    ['an île']

    Args:
        tokenizer: a tokenizer with the end mark as its only special token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A text that contains "<eos>" is encoded letter by letter, not as the end mark. The file of
        # a tokenizer does not store this option.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], size: int, *, tokenized: bool) -> "Subwords":
        """Train `size` subwords on texts; a small text may yield fewer.

        Args:
            texts: the texts, iterated once.
            size: number of subwords, at least 257.
            tokenized: whether the text is tokenized, so that only white space separates words.
        """
        tokenizer = Tokenizer(models.BPE())
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=not tokenized)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pieces])
            if tokenized
            else pieces
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((_normalized(text) for text in texts), trainer)
        return cls(tokenizer)

    @classmethod
    def from_json(cls, content: str) -> "Subwords":
        """Return the subwords from the result of `to_json`.

        Raises:
            InputError: the content is not a result of `to_json`.
        """
        try:
            return cls(Tokenizer.from_str(content))
        except Exception as error:  # the library raises bare Exceptions for damaged content
            raise InputError(
                f"the subwords cannot be read ({error}): expected what Subwords.to_json wrote"
            ) from error

    def to_json(self) -> str:
        """Return the subwords as JSON, for `from_json`."""
        return str(self._tokenizer.to_str())

    @property
    def size(self) -> int:
        """Return the number of subwords, the end mark included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without end marks."""
        encodings = self._tokenizer.encode_batch_fast([_normalized(text) for text in texts])
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of ids with single spaces between words, without end marks.

        Bytes that are not valid UTF-8, which a model may generate, are replaced by U+FFFD.
        """
        texts = self._tokenizer.decode_batch([list(row) for row in ids], skip_special_tokens=True)
        return [_normalized(text) for text in texts]


class Words:
    """A vocabulary of words, separated by white space.

    >>> words = Words.count(["to be or not to be"], size=4)
    >>> words.encode(["to see or to be"]), words.decode([[3, 1, 2, 0]])
    ([[3, 1, 1, 3, 2]], ['to <unk> be'])

    Args:
        words: in the order of their ids, after the end mark (`END_ID`) and `<unk>`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [END, UNKNOWN, *words]
        ids = {word: number for number, word in enumerate([_NO_WORD, UNKNOWN, *words])}
        self._tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    @classmethod
    def count(cls, texts: Iterable[str], size: int | None = None) -> "Words":
        """Build a vocabulary of the words of texts, sorted by frequency, then alphabetically.

        Args:
            texts: the texts, iterated once.
            size: maximal number of entries, including the end mark and `<unk>`; None is all words.
        """
        counts = Counter(chain.from_iterable(text.split() for text in texts))
        # Texts with `<unk>` for rare words, such as the Penn Treebank's files, mean this entry.
        for known in (END, UNKNOWN):
            counts.pop(known, None)
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ordered if size is None else ordered[: max(0, size - 2)])

    @classmethod
    def from_json(cls, content: str) -> "Words":
        """Return the words from the result of `to_json`.

        Raises:
            InputError: the content is not a result of `to_json`.
        """
        try:
            words = json.loads(content)["words"]
            return cls([str(word) for word in words])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"the words cannot be read ({error}): expected what Words.to_json wrote"
            ) from error

    def to_json(self) -> str:
        """Return the words as JSON, for `from_json`."""
        return json.dumps({"words": self._words[2:]}, ensure_ascii=False)

    @property
    def size(self) -> int:
        """Return the number of entries, the end mark and `<unk>` included."""
        return len(self._words)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without end marks."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of ids with single spaces between words, without end marks."""
        return [" ".join(self._words[one] for one in row if one != END_ID) for row in ids]


def _normalized(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class EncodedSplit:
    """A split as one stream of subwords or words, every document followed by the end mark."""

    tokens: Tensor
    """int32, (num_tokens,)."""
    num_words: int

    @property
    def num_tokens(self) -> int:
        """Return the number of subwords or words, end marks included."""
        return self.tokens.numel()


@dataclass(frozen=True)
class EncodedCorpus:
    """A corpus, encoded with subwords or words."""

    corpus: Corpus
    vocabulary_size: int
    splits: dict[Split, EncodedSplit]
    fingerprint: str
    """A hash of everything that determines the token ids."""
    unknown_id: int | None = field(default=None, kw_only=True)
    """Id of words that are not in the vocabulary; None for subwords, which spell every word."""


def encode_corpus(
    corpus: Corpus,
    vocabulary_size: int,
    kind: type[Subwords] | type[Words] = Subwords,
    by: Corpus | None = None,
) -> EncodedCorpus:
    """Train subwords or words on the train split and encode all splits, or load the cached result.

    Words are joined by single spaces, since the kind of white space is not modeled. Subwords can
    spell every string, since each byte is one; words of other splits that are not in a vocabulary
    of words become `<unk>`. A small text may yield fewer entries than `vocabulary_size`.

    Args:
        corpus: the text.
        vocabulary_size: number of subwords or words.
        kind: `Subwords` or `Words`.
        by: text that defines the subwords or words, such as that of a trained model; None is
            `corpus`. If it is given, the result is not cached.

    Raises:
        InputError: a split has no words.
    """
    if by is not None:
        _check_words(corpus)
    key, found = _found(by or corpus, vocabulary_size, kind)
    known = kind.from_json(found.texts["subwords"])
    if by is None:
        return _encoded(corpus, found.tensors, known, key)
    streams: dict[str, Tensor] = {split: _encode(known, corpus, split) for split in SPLITS}
    return _encoded(corpus, streams, known, cache_key(subwords=key, text=corpus.fingerprint()))


def _check_words(corpus: Corpus) -> None:
    for split in SPLITS:
        if not corpus.num_words(split):
            raise InputError(f"the {split} split of {corpus.source} has no words: give it text")


def _found(
    corpus: Corpus, vocabulary_size: int, kind: type[Subwords] | type[Words]
) -> tuple[str, Encoded]:
    """Return the cache key of an encoded corpus, and the entry with streams and vocabulary."""
    _check_words(corpus)
    key = cache_key(
        # The key of subwords has no kind, as in earlier caches.
        **({} if kind is Subwords else {"kind": kind.__name__}),
        format=CACHE_FORMAT,
        text=corpus.fingerprint(),
        vocabulary_size=vocabulary_size,
        tokenizers=tokenizers.__version__,
    )

    def make() -> Encoded:
        known = _train(corpus, vocabulary_size, kind)
        streams: dict[str, Tensor] = {split: _encode(known, corpus, split) for split in SPLITS}
        return Encoded(streams, {"subwords": known.to_json()})

    return key, found_or_made(f"{key}.tokens", make)


def _encoded(
    corpus: Corpus, streams: Mapping[str, Tensor], known: Subwords | Words, key: str
) -> EncodedCorpus:
    return EncodedCorpus(
        corpus=corpus,
        vocabulary_size=known.size,
        splits={s: EncodedSplit(streams[s], corpus.num_words(s)) for s in SPLITS},
        fingerprint=key,
        unknown_id=UNKNOWN_ID if isinstance(known, Words) else None,
    )


def _train(
    corpus: Corpus, vocabulary_size: int, kind: type[Subwords] | type[Words]
) -> Subwords | Words:
    if issubclass(kind, Words):
        return Words.count(corpus.documents["train"], vocabulary_size)
    # Official files are tokenized (`<unk>`, `n't`): only white space separates their words.
    tokenized = bool(corpus.line_ends_count)
    return Subwords.train(corpus.documents["train"], vocabulary_size, tokenized=tokenized)


def _encode(subwords: Subwords | Words, corpus: Corpus, split: Split) -> Tensor:
    documents = iter(corpus.documents[split])
    # In portions: the encodings of 100 million words at once would not fit into memory.
    portions = iter(lambda: list(islice(documents, PORTION)), [])
    return torch.cat([_stream(subwords.encode(portion)) for portion in portions])


def _stream(documents: list[list[int]]) -> Tensor:
    return torch.tensor([i for ids in documents for i in (*ids, END_ID)], dtype=torch.int32)
