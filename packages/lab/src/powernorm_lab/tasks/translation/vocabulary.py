"""Text of translations as ids, and back: Moses' tokens, and existing subwords.

`data.subwords` selects existing subwords. With `split`, the lines hold subwords such as `Hau@@ s`,
as written by fairseq's scripts. With the path of codes (the merges that subword-nmt learned) or of
a model of SentencePiece (`.model`), the lines hold words, which are split into subwords.

Optional files in the same folder: the codes of split files as `code`, and the vocabularies of
fairseq as `dict.de.txt` and `dict.en.txt`. Without vocabularies, all subwords of the train split
are used.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from sacremoses import MosesDetokenizer, MosesTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from powernorm.errors import InputError
from powernorm.integrations.extras import LABORATORY, install_command
from powernorm_lab.data.files import read_lines
from powernorm_lab.data.subwords import UNKNOWN, Subwords, Words
from powernorm_lab.engine.folders import read_json
from powernorm_lab.tasks.translation.readers import ParallelCorpus, TextPair

# Tokenization by Moses.


MOSES: Final = version("sacremoses")
NO_LANGUAGE: Final = "en"
"""Language whose rules are used if the language is unknown."""
_DETECTED_LINES: Final = 20_000
"""Number of lines from which options are detected."""
ESCAPES: Final = ("&apos;", "&quot;", "&amp;", "&#91;", "&lt;")
SPLIT_DASH: Final = "@-@"


@dataclass(frozen=True)
class Tokenization:
    """Options of Moses' tokenizer, detected from its output."""

    escapes: bool
    """Whether `'`, `"`, `&` and similar characters are escaped, as `&apos;`."""
    splits_dashes: bool
    """Whether words are split at dashes, as `semi @-@ final`."""
    lowercase: bool

    @classmethod
    def of(cls, lines: Iterable[str]) -> "Tokenization":
        """Detect the options from the first lines of a corpus."""
        sample = list(islice(lines, _DETECTED_LINES))
        return cls(
            escapes=any(mark in line for line in sample for mark in ESCAPES),
            splits_dashes=any(SPLIT_DASH in line.split() for line in sample),
            lowercase=all(line == line.lower() for line in sample),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON."""
        return asdict(self)


class Moses:
    """Tokenizes text of the source language, and detokenizes the target language.

    Args:
        languages: source and target language.
        tokenization: options of the corpus.
    """

    def __init__(self, languages: tuple[str, str], tokenization: Tokenization) -> None:
        self._tokenizer = MosesTokenizer(lang=moses_rules(languages[0]))
        self._detokenizer = MosesDetokenizer(lang=moses_rules(languages[1]))
        self._tokenization = tokenization

    def tokenized(self, text: str) -> str:
        """Return the tokens of a text with spaces between them, as in the corpus."""
        known = self._tokenization
        tokens: str = self._tokenizer.tokenize(
            text.lower() if known.lowercase else text,
            aggressive_dash_splits=known.splits_dashes,
            escape=known.escapes,
            return_str=True,
        )
        return tokens

    def detokenized(self, tokens: str) -> str:
        """Return the detokenized text."""
        return str(self._detokenizer.detokenize(tokens.split()))


def moses_rules(language: str) -> str:
    """Return sacremoses' code of a language, such as de for de_DE.

    For languages without rules, sacremoses uses general ones with English abbreviations.
    """
    return language.lower().replace("_", "-").split("-")[0] or NO_LANGUAGE


# Subwords.


LEARNED: Final = "learned"
SPLIT: Final = "split"
MODEL_SUFFIX: Final = ".model"
CODES_FILE: Final = "code"
"""Name of the codes that fairseq's scripts write into the folder of split files."""
_MARK: Final = "@@"
_JOINTS: Final = re.compile(rf"{_MARK} |{_MARK}$")
_END_OF_WORD: Final = "</w>"
_END_CHARACTER: Final = "\ue000"
"""A private-use character for the end of a word, which is a separate symbol in version 0.1."""
_SAMPLE: Final = 1000
"""Number of lines of split files with which their codes are checked."""
_PORTION: Final = 4096
"""Number of lines that are split at a time."""


def joined(text: str) -> str:
    """Join subwords to words.

    >>> joined("das Hau@@ s brenn@@ t")
    'das Haus brennt'
    """
    return _JOINTS.sub("", text.rstrip())


class Codes:
    r"""The merges of byte-pair encoding that subword-nmt learned (Sennrich et al. 2016).

    >>> Codes("#version: 0.2\nu s</w>\na us</w>\n").split(["das haus brennt", "us"])
    ['d@@ a@@ s h@@ aus b@@ r@@ e@@ n@@ n@@ t', 'us']

    Args:
        content: content of the file.
        name: name of the file, for messages.

    Raises:
        InputError: the content is not that of such a file; the message names the line.
    """

    def __init__(self, content: str, name: str = "the codes") -> None:
        self.content = content
        lines = content.rstrip("\n").split("\n")
        version = re.fullmatch(r"#version: (0\.[12])\s*", lines[0])
        first = 1 if version else 0
        # In version 0.1, whose files may lack a header, the end of a word is a separate symbol.
        self._has_own_end = version is None or version[1] == "0.1"
        merges: dict[tuple[str, str], None] = {}
        for number, line in enumerate(lines[first:], start=first + 1):
            parts = line.strip("\r ").split(" ")
            if len(parts) != 2 or not all(parts):
                raise InputError(
                    f"{name}, line {number}: {line[:40]!r} is no pair of symbols; expected codes "
                    "of subword-nmt, as `l o` or `lo w</w>`, one merge on each line"
                )
            if self._has_own_end:
                parts = [part.replace(_END_OF_WORD, _END_CHARACTER) for part in parts]
            merges[parts[0], parts[1]] = None
        symbols = dict.fromkeys(chain.from_iterable((*pair, "".join(pair)) for pair in merges))
        # The empty symbol, which no merge has, is the unknown token.
        ids = {symbol: number for number, symbol in enumerate(["", *symbols])}
        suffix = "" if self._has_own_end else _END_OF_WORD
        self._tokenizer = Tokenizer(
            models.BPE(ids, list(merges), unk_token="", end_of_word_suffix=suffix)
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def split(self, texts: Sequence[str]) -> list[str]:
        """Split the words of texts into subwords."""
        if self._has_own_end:
            texts = [" ".join(word + _END_CHARACTER for word in text.split()) for text in texts]
        found = self._tokenizer.encode_batch(list(texts))
        return [_marked(text, one) for text, one in zip(texts, found, strict=True)]


def _marked(text: str, encoding: Any) -> str:
    words: list[list[str]] = []
    before = None
    for (start, end), word in zip(encoding.offsets, encoding.word_ids, strict=True):
        if word != before:
            words.append([])
        before = word
        piece = text[start:end].rstrip(_END_CHARACTER)
        if piece:
            words[-1].append(piece)
    return " ".join(f"{_MARK} ".join(pieces) for pieces in words)


class Pieces:
    """A vocabulary of subwords with subword-nmt's marks: `@@` after all but a word's last one.

    Args:
        words: the subwords with marks.
        codes: codes that split words; None for texts that are split already.
    """

    def __init__(self, words: Words, codes: Codes | None) -> None:
        self._words = words
        self.codes = codes

    def to_json(self) -> str:
        """Return the vocabulary and codes as JSON, for `text_encoder`."""
        codes = None if self.codes is None else self.codes.content
        return json.dumps({**json.loads(self._words.to_json()), "codes": codes})

    @property
    def size(self) -> int:
        """Return the number of subwords, including the end mark and `<unk>`."""
        return self._words.size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without end marks; codes, if given, split the words first."""
        if self.codes is not None:
            texts = self.codes.split([joined(text) for text in texts])
        return self.encode_split(texts)

    def encode_split(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts that are split already."""
        return self._words.encode(texts)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of ids, with subwords joined to words."""
        return [joined(text) for text in self._words.decode(ids)]


class SentencePieces:
    """The subwords of a SentencePiece model (Kudo and Richardson 2018), with ids shifted by one.

    Args:
        model: content of the model's file.
        name: name of the file, for messages.

    Raises:
        InputError: the library is missing, or cannot read the model.
    """

    def __init__(self, model: bytes, name: str = "the model") -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ModuleNotFoundError as error:
            raise InputError(
                f"{name} needs the package sentencepiece: "
                f"{install_command(LABORATORY, 'sentencepiece')}"
            ) from error
        self._model = model
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise InputError(
                f"{name} is no model of SentencePiece: give its .model file"
            ) from error

    def to_json(self) -> str:
        """Return the model as JSON, for `text_encoder`."""
        return json.dumps({"sentencepiece": base64.b64encode(self._model).decode()})

    @property
    def size(self) -> int:
        """Return the number of subwords, including the end mark."""
        return int(self._processor.get_piece_size()) + 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without end marks."""
        return [[one + 1 for one in row] for row in self._processor.encode(list(texts))]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of ids, without end marks."""
        rows = [[one - 1 for one in row if one] for row in ids]
        return [" ".join(text.split()) for text in self._processor.decode(rows)]


TextEncoder = Subwords | Pieces | SentencePieces
"""Converts text to ids and back."""


def text_encoder(content: str) -> TextEncoder:
    """Return the subwords of any kind from the result of their `to_json`.

    Raises:
        InputError: the content is not a result of `to_json`, or a library is missing.
    """
    try:
        known = json.loads(content)
        if "sentencepiece" in known:
            return SentencePieces(base64.b64decode(known["sentencepiece"]))
        if "words" in known:
            codes = None if known["codes"] is None else Codes(known["codes"])
            return Pieces(Words.from_json(content), codes)
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"the subwords cannot be read ({error})") from error
    return Subwords.from_json(content)


@dataclass(frozen=True)
class ImportedSubwords:
    """Existing subwords, read from the files of `data.subwords`."""

    is_joint: bool
    """Whether source and target share a vocabulary."""
    is_split: bool = False
    """Whether the lines are split into subwords already."""
    codes: Codes | None = None
    dictionaries: tuple[Words, ...] | None = None
    """Vocabularies of source and target, or a joint one; None to count subwords instead."""
    model: SentencePieces | None = None

    @property
    def fingerprint(self) -> str:
        """Return a hash of all fields."""
        parts = [
            f"{self.is_joint} {self.is_split}",
            "" if self.codes is None else self.codes.content,
            "" if self.model is None else self.model.to_json(),
            *(words.to_json() for words in self.dictionaries or ()),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encoders(self, pairs: Iterable[TextPair]) -> tuple[TextEncoder, TextEncoder]:
        """Return the subwords of source and target, the same object for a joint vocabulary.

        Args:
            pairs: pairs of the train split; iterated several times if subwords are counted.

        Raises:
            InputError: the split files were not split by the codes.
        """
        if self.model is not None:
            return self.model, self.model
        if self.is_split and self.codes is not None:
            _check_codes(self.codes, chain.from_iterable(pairs))
        words = self.dictionaries or tuple(
            Words.count(self._pieces(texts)) for texts in self._sides(pairs)
        )
        found = [Pieces(one, self.codes) for one in words]
        return found[0], found[-1]

    def _sides(self, pairs: Iterable[TextPair]) -> list[Iterable[str]]:
        """Return the texts on which each vocabulary is counted."""
        if self.is_joint:
            return [chain.from_iterable(pairs)]
        return [(source for source, _ in pairs), (target for _, target in pairs)]

    def _pieces(self, texts: Iterable[str]) -> Iterator[str]:
        if self.is_split or self.codes is None:
            yield from texts
            return
        remaining = iter(texts)
        while portion := list(islice(remaining, _PORTION)):
            yield from self.codes.split(portion)


def _check_codes(codes: Codes, texts: Iterable[str]) -> None:
    for text in islice(texts, _SAMPLE):
        (own,) = codes.split([joined(text)])
        if own != " ".join(text.split()):
            raise InputError(
                f"the file {CODES_FILE} next to the split files is not that of their subwords: it "
                f"makes {own!r} of {text!r}; rename it, or replace it by the right codes"
            )


def read_subwords(
    chosen: str, corpus: ParallelCorpus, *, is_joint: bool
) -> ImportedSubwords | None:
    """Read the subwords of `data.subwords`; return None if they are to be learned.

    Args:
        chosen: `learned`, `split`, or the path of codes or of a SentencePiece model.
        corpus: corpus of the subwords.
        is_joint: whether source and target share a vocabulary.

    Raises:
        InputError: a file is missing, or is of another kind.
    """
    if chosen == LEARNED:
        return None
    path = Path(corpus.source) / CODES_FILE if chosen == SPLIT else Path(chosen)
    codes = None
    if path.is_file():
        if chosen != SPLIT and path.suffix == MODEL_SUFFIX:
            return ImportedSubwords(True, model=SentencePieces(path.read_bytes(), str(path)))
        codes = Codes("\n".join(read_lines(path)), str(path))
    elif chosen != SPLIT:
        raise InputError(
            f"data.subwords={chosen}: there is no such file; give learned, split, the path of "
            f"codes of subword-nmt, or that of a SentencePiece model ({MODEL_SUFFIX})"
        )
    languages = (corpus.source_language, corpus.target_language)
    found = _dictionaries(path.parent, languages, is_joint=is_joint)
    return ImportedSubwords(is_joint, chosen == SPLIT, codes, found)


def _dictionaries(
    folder: Path, languages: tuple[str, str], *, is_joint: bool
) -> tuple[Words, ...] | None:
    paths = [folder / f"dict.{language}.txt" for language in languages]
    there = [path for path in paths if path.is_file()]
    if not there:
        return None
    if len(there) == 1:
        (missing,) = {*paths} - {*there}
        raise InputError(f"{missing} is missing next to {there[0].name}: give both, or neither")
    source, target = map(_read_dictionary, paths)
    if is_joint and source.to_json() != target.to_json():
        raise InputError(
            f"{paths[0]} and {paths[1].name} differ: set data.joint_vocabulary=false, with "
            "model.shared_embeddings=target or none; or give the joint vocabulary twice"
        )
    return (source,) if is_joint else (source, target)


def _read_dictionary(path: Path) -> Words:
    """Read a vocabulary of fairseq, with `piece count` on each line, without `<unk>`."""
    pieces: dict[str, None] = {}
    for number, line in enumerate(read_lines(path), start=1):
        parts = line.removesuffix(" #fairseq:overwrite").split(" ")
        if len(parts) != 2 or not parts[0] or not parts[1].isdecimal():
            raise InputError(
                f"{path}, line {number}: {line[:40]!r} is no piece with a count; expected a "
                "vocabulary of fairseq, as `Hau@@ 12`"
            )
        if parts[0] in pieces:
            raise InputError(f"{path}, line {number}: {parts[0]} is a duplicate")
        pieces[parts[0]] = None
    return Words([piece for piece in pieces if piece != UNKNOWN])


@dataclass(frozen=True)
class SubwordVocabulary:
    """Subwords of source and target, with languages and tokenization."""

    source: TextEncoder
    target: TextEncoder
    languages: tuple[str, str]
    tokenization: Tokenization | None
    """Tokenization of tokenized text; None for raw text."""

    def to_json(self) -> dict[str, Any]:
        """Return the record for a run's folder, with which the run can translate."""
        is_joint = self.target is self.source
        return {
            "source_language": self.languages[0],
            "target_language": self.languages[1],
            "tokenisation": None if self.tokenization is None else self.tokenization.to_json(),
            "source": self.source.to_json(),
            "target": None if is_joint else self.target.to_json(),
        }


def read_vocabulary(path: Path) -> SubwordVocabulary:
    """Read the record of a `SubwordVocabulary` from a file.

    Raises:
        InputError: the file is missing or damaged.
    """
    if not path.is_file():
        raise InputError(
            f"{path} with the subwords is missing: keep a model in the folder of its run"
        )
    return vocabulary_of(read_json(path), path)


def vocabulary_of(content: Mapping[str, Any], path: Path) -> SubwordVocabulary:
    """Return the subwords of the record of a `SubwordVocabulary`.

    Args:
        content: the record.
        path: path of its file, for messages.

    Raises:
        InputError: the record is invalid.
    """
    try:
        source = text_encoder(content["source"])
        target = source if content["target"] is None else text_encoder(content["target"])
        languages = (str(content["source_language"]), str(content["target_language"]))
        found = content["tokenisation"]
        tokenization = None if found is None else Tokenization(**found)
        return SubwordVocabulary(source, target, languages, tokenization)
    except (KeyError, TypeError, InputError) as error:
        raise InputError(f"{path} holds no subwords ({error!r}): train the run again") from error
