"""Sentences with entities: embedded, fetched, or the user's files; and word vectors.

A file has a word on each line, its tag last, and empty lines between sentences. These are
CoNLL-2003 (word, part of speech, chunk and tag; lines `-DOCSTART-` between documents), and files
with two columns such as those of Resume, MSRA and Weibo (a character and its tag). Columns are
separated by tabs or, in a file without tabs, by spaces. The scheme of the tags is detected
(`tag_schemes`): one with ends of entities if M, E, L, S or U occurs, else IOB2 if all tags fit it,
else IOB1, the scheme of the original release of CoNLL-2003, in which an entity begins with I. Tags
that fit no scheme are an error.

Word vectors are in GloVe's text format: a word and its numbers on each line, separated by spaces. A
first line of two integers (word2vec's numbers of words and features) is skipped.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.catalog import data_set, embedded_texts
from powernorm_lab.data.corpus import SPLITS, TEN, Split, split_by_position
from powernorm_lab.data.fetching import fetched
from powernorm_lab.data.files import USER_LICENSE, SplitFiles, read_text, split_sentences
from powernorm_lab.tasks.ner.tag_schemes import (
    BOUNDARY_LETTERS,
    TAG,
    IllegalTagError,
    Scheme,
    Span,
    spans_of,
)

DOCUMENT_START: Final = "-DOCSTART-"
_BLANKS: Final = " \t"
"""White space of the format; not `str.isspace`, because a Chinese text may hold ideographic spaces
as characters."""


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """A sentence and its entities."""

    words: tuple[str, ...]
    spans: tuple[Span, ...]


class _Line(NamedTuple):
    number: int
    word: str
    tag: str


_Block = list[_Line]


def parse_columns(text: str, source: str, scheme: Scheme | None = None) -> list[TaggedSentence]:
    r"""Read the sentences of a file.

    Args:
        text: content of the file, with "\n" at the ends of lines.
        source: name of the file, for messages.
        scheme: scheme of the tags; None detects it.

    Raises:
        InputError: a line is damaged; the message names file, line, column and the expected value.
    """
    blocks = _blocks(text, source)
    reason = f"the file is read as {scheme}"
    if scheme is None:
        scheme, reason = _scheme(blocks, source)
    return [
        TaggedSentence(
            tuple(line.word for line in block), tuple(_spans(block, scheme, reason, source))
        )
        for block in blocks
    ]


def _blocks(text: str, source: str) -> list[_Block]:
    blocks: list[_Block] = [[]]
    split: Callable[[str], list[str]] = _at_tabs if "\t" in text else _at_spaces
    num_columns: int | None = None
    known: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip(_BLANKS):
            blocks.append([])
            continue
        columns = split(line)
        if columns[0] == DOCUMENT_START:
            blocks.append([])
            continue
        num_columns = num_columns or max(len(columns), 2)
        if len(columns) != num_columns or columns[-1] not in known:
            _check_columns(columns, num_columns, f"{source}, line {number}")
            known.add(columns[-1])
        if not columns[0].strip(_BLANKS):
            expected = f"column 1 (word): {columns[0]!r}; expected a word"
            raise InputError(f"{source}, line {number}, {expected}")
        blocks[-1].append(_Line(number, columns[0], columns[-1]))
    return [block for block in blocks if block]


def _at_tabs(line: str) -> list[str]:
    return line.split("\t")


def _at_spaces(line: str) -> list[str]:
    columns = line.split(" ")
    return [column for column in columns if column] if "" in columns else columns


def _check_columns(columns: list[str], expected: int, where: str) -> None:
    if len(columns) != expected:
        raise InputError(
            f"{where} has {len(columns)} columns: expected {expected}, a word first and its tag "
            "last, separated by tabs or spaces"
        )
    if not TAG.fullmatch(columns[-1]):
        raise InputError(
            f"{where}, column {expected} (tag): {columns[-1]!r}; expected O, or one of B, I, M, E, "
            "L, S and U with a hyphen and the kind of the entity, such as B-PER"
        )


def _scheme(blocks: list[_Block], source: str) -> tuple[Scheme, str]:
    """Return the scheme of a file, and the reason for choosing it."""
    for block in blocks:
        for line in block:
            if line.tag[0] in BOUNDARY_LETTERS:
                reason = (
                    f"the file is read as BIOES (BMES), because line {line.number} has {line.tag}"
                )
                return "bioes", reason
    damage = _first_damage(blocks, "iob2", source)
    if damage is None or _first_damage(blocks, "iob1", source) is not None:
        return "iob2", "the file is read as IOB2, because not all of its tags fit IOB1"
    return "iob1", "the file is read as IOB1"


def _first_damage(blocks: list[_Block], scheme: Scheme, source: str) -> InputError | None:
    for block in blocks:
        try:
            _spans(block, scheme, "", source)
        except InputError as error:
            return error
    return None


def _spans(block: _Block, scheme: Scheme, reason: str, source: str) -> list[Span]:
    try:
        return spans_of([line.tag for line in block], scheme)
    except IllegalTagError as error:
        if error.position < len(block):
            line = block[error.position]
            found = f"the tag {line.tag}"
        else:
            line = block[-1]
            found = f"the sentence ends after {line.tag}"
        raise InputError(
            f"{source}, line {line.number}: {found}; expected {error.expected} ({reason})"
        ) from error


# Three splits.


DEFAULT: Final = "hironsan"
FETCHED: Final = ("conll2003", "msra")
"""Data sets that are fetched on request."""
NAMES: Final = (DEFAULT, *FETCHED)
_FILES: Final = SplitFiles(
    re.compile(
        r"(?:(?P<name>.+)[._-])?(?P<split>train|valid|dev|test[ab]?)(?:\.(?:char|word|all|ner))?"
        r"(?:\.(?:txt|char|bmes|bmeso|bioes|iob|iob1|iob2|bio|conll|tsv|ner))?"
    ),
    "eng.train, eng.testa and eng.testb, or train, dev (valid) and test with an ending such as "
    ".txt, .conll or .char.bmes",
    "data sets",
    optional=("valid",),
)
"""Names such as `eng.testa`, `train.char.bmes`, `msra_train.txt` and `dev.conll`."""


@dataclass(frozen=True, slots=True)
class EntityCorpus:
    """Sentences with entities in three splits."""

    name: str
    source: str
    license: str
    sentences: Mapping[Split, tuple[TaggedSentence, ...]]

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of entities of all splits, sorted."""
        found = {
            span.kind for part in self.sentences.values() for item in part for span in item.spans
        }
        return sorted(found)


def load_entities(source: str | None) -> EntityCorpus:
    """Return the sentences that a configuration names.

    - `hironsan`: 500 Japanese sentences of `powernorm-data`
    - `conll2003`, `msra`: English and Chinese news, after they were fetched
    - a folder with the official files, or the path of its train file. Without a valid split, every
      tenth sentence of the train split is used for validation.
    - any other file; of every ten sentences the ninth is valid and the tenth test

    Args:
        source: one of these; None is `hironsan`. (Use `./msra` for a path with the name of a data
            set.)

    Raises:
        InputError: there is no such file, a file is damaged, or the data set was not fetched.
    """
    name = DEFAULT if source is None else source
    if name == DEFAULT:
        return _embedded()
    if name in FETCHED:
        about = data_set(name)
        return _read_folder(fetched(name), name, about.source, about.license)
    return _read_path(Path(name))


def _embedded() -> EntityCorpus:
    about = data_set(DEFAULT)
    (text,), (file,) = embedded_texts(about), about.files
    # Two of its entities begin with I.
    sentences = parse_columns(text, file.name, "iob")
    return EntityCorpus(DEFAULT, about.source, about.license, split_by_position(sentences, TEN))


def _parse(path: Path) -> list[TaggedSentence]:
    return parse_columns(read_text(path), str(path))


def _read_path(path: Path) -> EntityCorpus:
    if path.is_dir():
        return _read_folder(path, None, str(path), USER_LICENSE)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with {_FILES.expected}, one file with a word "
            f"and its tag on each line, or the name of a data set ({', '.join(NAMES)})"
        )
    prefix = _FILES.train_name(path)
    if prefix is not None and _others(path.parent, prefix):
        name = prefix or path.parent.resolve().name
        return _read_official(path.parent, prefix, name, str(path.parent), USER_LICENSE)
    return EntityCorpus(path.stem, str(path), USER_LICENSE, split_sentences(_parse(path), path))


def _others(folder: Path, name: str) -> bool:
    """Return whether the folder of a train file has other splits."""
    matches = (_FILES.pattern.fullmatch(path.name) for path in folder.iterdir())
    return any(m and (m["name"] or "") == name and m["split"] != "train" for m in matches)


def _read_folder(folder: Path, name: str | None, source: str, license: str) -> EntityCorpus:
    prefix = _FILES.only_name(_FILES.names(folder), folder)
    if prefix is None:
        raise InputError(f"{folder} holds no sentences with entities: expected {_FILES.expected}")
    return _read_official(folder, prefix, name or prefix or folder.resolve().name, source, license)


def _read_official(folder: Path, prefix: str, name: str, source: str, license: str) -> EntityCorpus:
    parts = {split: tuple(_parse(path)) for split, path in _FILES.of(folder, prefix).items()}
    if "valid" not in parts:
        tenth = TEN.length - 1
        train = parts["train"]
        parts["valid"] = train[tenth :: TEN.length]
        parts["train"] = tuple(
            sentence for index, sentence in enumerate(train) if index % TEN.length != tenth
        )
        source = f"{source}, every tenth sentence of the train split set aside as valid"
    for split in SPLITS:
        if not parts[split]:
            raise InputError(f"the {split} split of {folder} has no sentences: give some")
    return EntityCorpus(name, source, license, {split: parts[split] for split in SPLITS})


# Word vectors.


_HEADER_COLUMNS: Final = 2
_FORMAT: Final = "a word and its numbers with single spaces between them"


def read_vectors(path: Path, words: Set[str]) -> dict[str, Tensor]:
    """Return the vectors of those words that a file has.

    A word that the file has only in another case (`EU` for `eu`) gets the first such vector. Only
    the numbers of these words are parsed; the number of columns of every line is checked.

    Args:
        path: path of the file, UTF-8.
        words: words to look up, in lower case.

    Returns:
        Vectors by word, float32, (features,), scaled to norm 1 as in Yan et al. 2019; zero vectors
        stay zero.

    Raises:
        InputError: the file cannot be read or is empty, a line is damaged, or it has none of the
            words.
    """
    exact: dict[str, Tensor] = {}
    other_case: dict[str, Tensor] = {}
    num_features = 0
    number = 0
    for number, line in _vector_lines(path):
        if number == 1 and _is_header(line):
            continue
        num_features = num_features or _num_features(line, f"{path}, line {number}")
        word, values = _word_and_numbers(line, num_features, f"{path}, line {number}")
        kept = exact if word in words else other_case
        key = word.lower()
        if key in words and key not in kept:
            kept[key] = _vector(values, f"{path}, line {number}")
    if not num_features:
        problem = "has no vector after its first line" if number else "is empty"
        raise InputError(f"{path} {problem}: expected {_FORMAT} in each line")
    found = other_case | exact
    if not found:
        raise InputError(
            f"{path} has a vector for none of the {len(words)} words of the data: expected vectors "
            "of its language"
        )
    return found


def _vector_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                try:
                    line = content.decode("utf-8").rstrip(" \t\r\n")
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{path}, line {number}: byte 0x{content[error.start]:02x} is not UTF-8 "
                        "text; convert the file to UTF-8"
                    ) from error
                if not line:
                    raise InputError(f"{path}, line {number} is empty: expected a word's vector")
                if "\t" in line:
                    # Otherwise a number could be read as the end of a word, here or in later lines.
                    raise InputError(
                        f"{path}, line {number} has a tab: expected {_FORMAT}; put one space in "
                        "place of each tab"
                    )
                yield number, line
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected word vectors in GloVe's text "
            "format"
        ) from error


def _is_header(line: str) -> bool:
    columns = line.split(" ")
    return len(columns) == _HEADER_COLUMNS and all(
        item.isascii() and item.isdigit() for item in columns
    )


def _num_features(line: str, where: str) -> int:
    """Return the number of numbers at the end of the first line; the word may contain spaces."""
    columns = line.split(" ")
    number = 0
    while number < len(columns) - 1 and _is_number(columns[-1 - number]):
        number += 1
    if not number:
        raise InputError(
            f"{where}, column {len(columns)}: {columns[-1][:40]!r}; expected {_FORMAT}"
        )
    return number


def _word_and_numbers(line: str, num_features: int, where: str) -> tuple[str, list[str]]:
    columns = line.rsplit(" ", num_features)
    if columns[0].strip(" ") and columns[0].endswith(" "):
        raise InputError(f"{where} has two consecutive spaces: expected {_FORMAT}")
    # Some published words contain spaces, so that more columns are an error only if numeric.
    _, space, last = columns[0].rpartition(" ")
    if len(columns) != num_features + 1 or (space and _is_number(last)):
        raise InputError(
            f"{where} has {line.count(' ') + 1} columns: expected a word and {num_features} "
            "numbers with single spaces between them, as in the first lines"
        )
    return columns[0], columns[1:]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _vector(values: list[str], where: str) -> Tensor:
    numbers: list[float] = []
    for column, value in enumerate(values, start=2):
        number = float(value) if _is_number(value) else math.nan
        if not math.isfinite(number):
            raise InputError(f"{where}, column {column}: {value[:40]!r}; expected a finite number")
        numbers.append(number)
    vector = torch.tensor(numbers, dtype=torch.float64)
    length = float(vector.norm())
    return (vector / length if length else vector).float()
