"""Byte-pair subwords of a corpus, trained on its train split and cached with their token ids."""

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import tokenizers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.cache import cache_key, read_cached, write_cached
from powernorm.lab.data.corpus import SPLITS, Corpus, Split

LOGGER = logging.getLogger(__name__)

END: Final = "<eos>"
"""Ends every document, and stands before the first one."""
END_ID: Final = 0
CACHE_FORMAT: Final = 1
PORTION: Final = 4096
"""Documents that are encoded at a time."""


@dataclass(frozen=True)
class EncodedSplit:
    """A split as one stream of subwords, every document followed by the end mark."""

    tokens: Tensor
    """int32, (num_tokens,)."""
    num_words: int

    @property
    def num_tokens(self) -> int:
        """Return the number of subwords, end marks included."""
        return self.tokens.numel()


@dataclass(frozen=True)
class EncodedCorpus:
    """A corpus over its subwords."""

    corpus: Corpus
    vocabulary_size: int
    splits: dict[Split, EncodedSplit]
    fingerprint: str
    """A hash of everything that determines the token ids."""


def encode_corpus(corpus: Corpus, vocabulary_size: int) -> EncodedCorpus:
    """Train byte-pair subwords on the train split and encode all splits, or find both cached.

    Words are joined by single spaces: which white space stood between them is not modeled. Every
    string can be encoded, since each byte is a subword. A small text may yield fewer subwords than
    asked for.

    Raises:
        InputError: a split has no words.
    """
    _check_words(corpus)
    key = _key(corpus, vocabulary_size)
    streams = _read_streams(key)
    if streams is None:
        tokenizer = _train(corpus, vocabulary_size)
        streams = {split: _encode(tokenizer, corpus, split) for split in SPLITS}
        streams["vocabulary_size"] = torch.tensor(tokenizer.get_vocab_size())
        write_cached(f"{key}.tokenizer.json", tokenizer.to_str().encode())
        write_cached(f"{key}.tokens.pt", _packed(streams))
    return _encoded(corpus, streams, key)


def encode_by(corpus: Corpus, other: Corpus, vocabulary_size: int) -> EncodedCorpus:
    """Encode a corpus with the subwords of another, which a model was trained with.

    Raises:
        InputError: a split has no words.
    """
    _check_words(corpus)
    key = _key(other, vocabulary_size)
    tokenizer = _read_tokenizer(key) or _train(other, vocabulary_size)
    # It is not part of what a tokenizer keeps in its file.
    tokenizer.encode_special_tokens = True
    streams: dict[Split | str, Tensor] = {s: _encode(tokenizer, corpus, s) for s in SPLITS}
    streams["vocabulary_size"] = torch.tensor(tokenizer.get_vocab_size())
    return _encoded(corpus, streams, cache_key(subwords=key, text=corpus.fingerprint()))


def _read_tokenizer(key: str) -> Tokenizer | None:
    content = read_cached(f"{key}.tokenizer.json")
    if content is None:
        return None
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # whatever a damaged file makes the library raise
        LOGGER.warning("The cached subwords %s are damaged (%s) and are made anew.", key, error)
        return None


def _check_words(corpus: Corpus) -> None:
    for split in SPLITS:
        if not corpus.num_words(split):
            raise InputError(f"The {split} split of {corpus.source} has no words: give it text.")


def _key(corpus: Corpus, vocabulary_size: int) -> str:
    return cache_key(
        format=CACHE_FORMAT,
        text=corpus.fingerprint(),
        vocabulary_size=vocabulary_size,
        tokenizers=tokenizers.__version__,
    )


def _encoded(corpus: Corpus, streams: dict[Split | str, Tensor], key: str) -> EncodedCorpus:
    return EncodedCorpus(
        corpus=corpus,
        vocabulary_size=int(streams["vocabulary_size"]),
        splits={s: EncodedSplit(streams[s], corpus.num_words(s)) for s in SPLITS},
        fingerprint=key,
    )


def _train(corpus: Corpus, vocabulary_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Official files are tokenized already (`<unk>`, `n't`): only white space may part their words.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=True, use_regex=not corpus.line_ends_count
    )
    if corpus.line_ends_count:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_normalized(corpus.documents["train"]), trainer)
    # A text that happens to contain "<eos>" is encoded letter by letter, not as the end mark.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encode(tokenizer: Tokenizer, corpus: Corpus, split: Split) -> Tensor:
    # In portions: the encodings of 100 million words at once would not fit into memory.
    documents = _normalized(corpus.documents[split])
    return torch.cat([_stream(tokenizer, part) for part in _portions(documents, PORTION)])


def _stream(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(documents):
        ids += encoding.ids
        ids.append(END_ID)
    return torch.tensor(ids, dtype=torch.int32)


def _portions(documents: Iterator[str], size: int) -> Iterator[list[str]]:
    while portion := list(islice(documents, size)):
        yield portion


def _normalized(documents: Sequence[str]) -> Iterator[str]:
    return (" ".join(document.split()) for document in documents)


def _packed(streams: dict[Split | str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(streams, buffer)
    return buffer.getvalue()


def _read_streams(key: str) -> dict[Split | str, Tensor] | None:
    content = read_cached(f"{key}.tokens.pt")
    if content is None:
        return None
    try:
        streams = torch.load(io.BytesIO(content), weights_only=True)
        if set(streams) == {*SPLITS, "vocabulary_size"}:
            return dict(streams)
    except Exception as error:  # whatever a damaged file makes torch raise
        LOGGER.warning("The cached tokens %s are damaged (%s) and are made anew.", key, error)
    return None


LEAST_SIZE: Final = 257
"""Every byte and the end mark."""
