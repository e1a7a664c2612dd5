"""Treebanks in three splits, from `powernorm-data` or the user's CoNLL-U or CoNLL-X files.

CoNLL-U is the format of Universal Dependencies: one word per line, ten tab-separated columns.
CoNLL-X, the format of the 2006 shared task, can be read, too: its columns CPOSTAG and POSTAG are in
place of UPOS and XPOS, and it has neither comments nor contractions.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from powernorm.errors import InputError
from powernorm_lab.data.catalog import data_set, embedded_texts
from powernorm_lab.data.corpus import TEN, Split, split_by_position
from powernorm_lab.data.files import USER_LICENSE, SplitFiles, read_text, split_sentences

COLUMNS: Final = (
    "ID",
    "FORM",
    "LEMMA",
    "UPOS",
    "XPOS",
    "FEATS",
    "HEAD",
    "DEPREL",
    "DEPS",
    "MISC",
)
UNSPECIFIED: Final = "_"
_ID, _FORM, _LEMMA, _UPOS, _XPOS, HEAD, DEPREL = (
    COLUMNS.index(name) for name in ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "HEAD", "DEPREL")
)
_NO_WORD: Final = re.compile(r"\d+[-.]\d+")
"""IDs of lines that are not words: `9-10` is a contraction, `8.1` an empty node."""

_NUMBER: Final = re.compile(r"[0-9]{1,9}")

_Line = tuple[int, str]


class Word(NamedTuple):
    """A syntactic word."""

    form: str
    lemma: str
    tag: str
    """Universal part of speech; `UNSPECIFIED` if the file has none."""
    head: int | None
    """Number of the head, from 1; 0 for the root, None if it is not annotated."""
    relation: str
    """Dependency relation to the head."""
    fine_tag: str = UNSPECIFIED
    """Language-specific part of speech, such as Penn Treebank's."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of a treebank."""

    words: tuple[Word, ...]
    comments: Mapping[str, str]
    """Values of the lines `# key = value` by key, such as `sent_id` and `text`."""
    source: str = field(default="", compare=False)
    """Name of the file."""
    lines: tuple[int, ...] = field(default=(), compare=False)
    """Line numbers of the words in the file, from 1."""


def parse_conllu(text: str, source: str) -> list[Sentence]:
    r"""Read the sentences of a file; contractions and empty nodes are left out.

    Args:
        text: content of the file, with "\n" at the ends of lines.
        source: name of the file, for messages.

    Raises:
        InputError: a line is damaged; the message names file, line, column and the expected value.
    """
    return [_sentence(block, source) for block in _blocks(text)]


def _blocks(text: str) -> Iterator[list[_Line]]:
    """Yield the numbered lines between blank ones, without blocks of comments only."""
    block: list[_Line] = []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line.strip():
            block.append((number, line))
        else:
            if any(not kept.startswith("#") for _, kept in block):
                yield block
            block = []


def _sentence(block: list[_Line], source: str) -> Sentence:
    words: list[Word] = []
    numbers: list[int] = []
    comments: dict[str, str] = {}
    for number, line in block:
        if line.startswith("#"):
            key, equals, value = line[1:].partition("=")
            if equals:
                comments[key.strip()] = value.strip()
            continue
        columns = line.split("\t")
        where = f"{source}, line {number}"
        _check_columns(columns, where)
        if _NO_WORD.fullmatch(columns[_ID]):
            continue
        words.append(_word(columns, len(words) + 1, where))
        numbers.append(number)
    for number, (position, word) in zip(numbers, enumerate(words, start=1), strict=True):
        if word.head is not None and (word.head > len(words) or word.head == position):
            expected = f"0 for the root or another of the sentence's {len(words)} words"
            raise damage(f"{source}, line {number}", HEAD, str(word.head), expected)
    if not words:
        number, _ = block[-1]
        raise InputError(
            f"{source}, line {number}: a sentence without words; expected at least one"
        )
    return Sentence(tuple(words), comments, source, tuple(numbers))


def _check_columns(columns: list[str], where: str) -> None:
    if len(columns) != len(COLUMNS):
        raise InputError(
            f"{where} has {len(columns)} columns: expected the {len(COLUMNS)} of CoNLL-U "
            f"({' '.join(COLUMNS)}) with tabs between them"
        )
    if "" in columns:
        raise damage(where, columns.index(""), "", f"a value, or {UNSPECIFIED} for none")


def _word(columns: list[str], position: int, where: str) -> Word:
    if columns[_ID] != str(position):
        expected = f"{position}, because the words of a sentence are counted from 1"
        raise damage(where, _ID, columns[_ID], expected)
    head = columns[HEAD]
    if head != UNSPECIFIED and not _NUMBER.fullmatch(head):
        raise damage(where, HEAD, head, f"the number of a word, or {UNSPECIFIED}")
    return Word(
        columns[_FORM],
        columns[_LEMMA],
        columns[_UPOS],
        None if head == UNSPECIFIED else int(head),
        columns[DEPREL],
        columns[_XPOS],
    )


def damage(where: str, column: int, value: str, expected: str) -> InputError:
    """Return the error for a value in a column, counted from 0."""
    return InputError(
        f"{where}, column {column + 1} ({COLUMNS[column]}): {value!r}; expected {expected}"
    )


# Three splits.


DEFAULT: Final = "petrogold"
_FILES: Final = SplitFiles(
    re.compile(r"(?:(?P<name>.+)[.-])?(?P<split>train|valid|dev|test)\.(?:conllu|conllx|conll)"),
    "*.train.conllu, *.dev.conllu and *.test.conllu (or .conllx, .conll)",
    "treebanks",
)


@dataclass(frozen=True, slots=True)
class Treebank:
    """Annotated sentences in three splits."""

    name: str
    source: str
    license: str
    sentences: Mapping[Split, tuple[Sentence, ...]]


def load_treebank(source: str | None) -> Treebank:
    """Return the treebank that a configuration names.

    - `petrogold`: Portuguese (PetroGold), split by document
    - `turkish`: Turkish, web and Wikipedia, split by sentence
    - a folder with `….train.conllu`, `….dev.conllu` and `….test.conllu` (`-` in place of the dot as
      in Universal Dependencies, `valid` in place of `dev`, or `.conllx` or `.conll` as the ending),
      or the path of the train file
    - any other such file, split by sentence

    Where no splits are given, of every ten groups the ninth is valid and the tenth test.

    Args:
        source: one of these; None is `petrogold`. (Use `./turkish` for a path with the name of a
            treebank.)

    Raises:
        InputError: there is no such treebank, or one of its files is damaged.
    """
    name = DEFAULT if source is None else source
    return _embedded(name) if name in _TREEBANKS else _read(Path(name))


def _embedded(name: str) -> Treebank:
    about = data_set(name)
    sentences = [
        sentence
        for text, file in zip(embedded_texts(about), about.files, strict=True)
        for sentence in parse_conllu(text, file.name)
    ]
    parts = split_by_position(_TREEBANKS[name](sentences), TEN)
    trees = {split: tuple(chain.from_iterable(groups)) for split, groups in parts.items()}
    return Treebank(name, about.origin, about.license, trees)


def _by_document(sentences: list[Sentence]) -> list[list[Sentence]]:
    """Group sentences by document; PetroGold's ids are like `247-20140910-MONOGRAFIA_0-12`."""
    documents = groupby(sentences, key=lambda item: item.comments["sent_id"].rpartition("-")[0])
    return [list(document) for _, document in documents]


def _one_by_one(sentences: list[Sentence]) -> list[list[Sentence]]:
    return [[sentence] for sentence in sentences]


def _parse(path: Path) -> list[Sentence]:
    return parse_conllu(read_text(path), str(path))


def _read(path: Path) -> Treebank:
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with {_FILES.expected}, one CoNLL-U or CoNLL-X "
            f"file, or the name of an embedded treebank ({', '.join(TREEBANKS)})"
        )
    if path.is_dir():
        folder, name = path, _FILES.only_name(_FILES.names(path), path)
        if name is None:
            raise InputError(f"{folder} holds no treebank: expected {_FILES.expected}")
    else:
        folder, name = path.parent, _FILES.train_name(path)
    if name is None:
        return Treebank(path.stem, str(path), USER_LICENSE, split_sentences(_parse(path), path))
    sentences = {split: tuple(_parse(file)) for split, file in _FILES.of(folder, name).items()}
    return Treebank(name or folder.resolve().name, str(folder), USER_LICENSE, sentences)


_TREEBANKS: Final[Mapping[str, Callable[[list[Sentence]], list[list[Sentence]]]]] = (
    MappingProxyType({"petrogold": _by_document, "turkish": _one_by_one})
)
"""Functions that divide sentences into groups; a group is not divided between splits."""

TREEBANKS: Final = tuple(_TREEBANKS)
"""Names of the embedded treebanks."""
