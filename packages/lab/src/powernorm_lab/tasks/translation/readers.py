"""Sentence pairs in three splits, read lazily from two files for each split, or from two columns.

`read_parallel` reads

- a folder with a file for each language and split, named as described in `layouts`, or the path
  of one of its train files.
- a folder with `train.tsv`, `valid.tsv` (or `dev.tsv`) and `test.tsv`, with a sentence and its
  translation on each line, separated by a tab, or the path of that `train.tsv`.
- any other such file, split by position: of every 20 lines the 10th is valid and the 20th test.

Files are read lazily and not kept in memory, except for the first lines of tables.

A first line of a table with two languages (`de<TAB>en`) is a header, which names the columns.
Without a header the columns are source and target, and languages are only labels.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, TWENTY, Split, split_of
from powernorm_lab.data.files import USER_LICENSE, SplitFiles, read_lines
from powernorm_lab.tasks.translation.layouts import (
    LanguagePair,
    SideFile,
    check_decompressed,
    check_train_side,
    choose_files,
    choose_languages,
    header_languages,
    language_pair,
    not_found,
    same_languages,
    side_file,
    side_files,
)

TextPair = tuple[str, str]
"""A sentence and its translation."""
_CHUNK: Final = 1 << 20
_SUBWORD_NMT: Final = "@@ "
_PIECE_MARKS: Final = {
    _SUBWORD_NMT: (
        "subword-nmt",
        "set data.subwords=split and data.vocabulary_size=none, or give",
    ),
    "\u2581": ("SentencePiece", "set data.subwords to the path of its model, and give"),
}
"""Program and advice for texts with these marks."""
_SAMPLE: Final = 1000
"""Number of lines that are searched for marks."""
EMPTY: Final = "empty"
"""Reason for leaving out a pair with a side without words."""


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs in three splits, with only a few in memory at a time."""

    name: str
    source: str
    license: str
    source_language: str
    target_language: str
    tokenized: bool
    """Whether the lines are tokenized, with spaces between tokens, as by Moses."""
    read: Callable[[Split], Iterator[TextPair]]
    """Yields all pairs of a split, including those without words."""
    hash_content: Callable[[], str] | None = None
    """Returns a hash of the pairs of `read`, faster than by hashing every pair."""
    is_split: bool = False
    """Whether the words are split into subwords already, as `Hau@@ s`."""
    num_dropped: dict[Split, Mapping[str, int]] = field(default_factory=dict, compare=False)
    """Numbers of left-out pairs by reason, for each split that was read to its end."""

    @property
    def languages(self) -> str:
        """Return source and target language, as `de-en`."""
        return f"{self.source_language}-{self.target_language}"

    def pairs(self, split: Split) -> Iterator[TextPair]:
        """Yield the pairs of a split, except those with a side without words.

        Raises:
            InputError: the data are damaged, no pair is left, or words are split into subwords
                contrary to `is_split`.
        """
        num_kept = num_empty = 0
        check = require_pieces if self.is_split else refuse_pieces
        for pair in check(self.read(split), f"The {split} split of {self.source}"):
            if not pair[0] or pair[0].isspace() or not pair[1] or pair[1].isspace():
                num_empty += 1
                continue
            num_kept += 1
            yield pair
        self.num_dropped[split] = {EMPTY: num_empty}
        if not num_kept:
            raise InputError(
                f"the {split} split of {self.source} has no sentence pairs: give it text in both "
                "languages"
            )

    def fingerprint(self) -> str:
        """Return a hash of the text of all splits, the languages and `tokenized`."""
        content = self._hash_pairs() if self.hash_content is None else self.hash_content()
        parts = f"{self.languages} {self.tokenized} {content}"
        return hashlib.sha256(parts.encode()).hexdigest()

    def _hash_pairs(self) -> str:
        digest = hashlib.sha256()
        for split in SPLITS:
            for source, target in self.read(split):
                # The lengths make the encoding of different pairs different.
                digest.update(f"{len(source)} {len(target)} {source}{target}".encode())
            digest.update(b"end")
        return digest.hexdigest()


def corpus_in_memory(
    name: str,
    pairs: Mapping[Split, Sequence[TextPair]],
    *,
    languages: tuple[str, str],
    source: str,
    license: str,
    tokenized: bool = False,
) -> ParallelCorpus:
    """Return a corpus of pairs in memory.

    Args:
        name: name of the corpus.
        pairs: pairs of each split.
        languages: source and target language.
        source: origin of the pairs.
        license: license of the pairs.
        tokenized: whether the sentences are tokenized, with spaces between tokens.
    """
    return ParallelCorpus(
        name=name,
        source=source,
        license=license,
        source_language=languages[0],
        target_language=languages[1],
        tokenized=tokenized,
        read=lambda split: iter(pairs[split]),
    )


_COLUMNS: Final = ("source", "target")
"""Labels of two columns without languages."""
_TABLES: Final = SplitFiles(
    re.compile(r"(?P<name>)(?P<split>train|valid|dev|test)\.tsv"),
    "train.tsv, valid.tsv (or dev.tsv) and test.tsv",
    "tables",
    optional=SPLITS,
)


def read_tables(folder: Path, languages: str | None, *, tokenized: bool) -> ParallelCorpus:
    """Find sentence pairs in a table for each split.

    Args:
        folder: folder of the tables.
        languages: source and target language.
        tokenized: whether the sentences are tokenized, with spaces between tokens.

    Raises:
        InputError: a split is missing, or the headers do not fit.
    """
    files = _TABLES.of(folder, "")
    for split in SPLITS:
        if split not in files:
            raise not_found(folder, f"{folder} has no {split} split: expected {_TABLES.expected}")
    columns = _columns([files[split] for split in SPLITS], languages)
    name = folder.resolve().name
    return _corpus(folder, name, columns, tokenized, lambda split: columns.read(files[split]))


def read_table(path: Path, languages: str | None, *, tokenized: bool) -> ParallelCorpus:
    """Find sentence pairs in one table: of every 20 the 10th is valid and the 20th test.

    The path of a `train.tsv` next to tables of other splits means all of them.

    Args:
        path: path of the table.
        languages: source and target language.
        tokenized: whether the sentences are tokenized, with spaces between tokens.

    Raises:
        InputError: the first line cannot be read, or is a header that does not fit.
    """
    if _TABLES.pattern.fullmatch(path.name):
        beside = _TABLES.of(path.parent, "")
        if beside.get("train") == path and len(beside) > 1:
            return read_tables(path.parent, languages, tokenized=tokenized)
        if path.name != "train.tsv" and "train" in beside:
            raise InputError(
                f"{path} is one split of several: give the folder {path.parent} or its train.tsv"
            )
    columns = _columns([path], languages)
    return _corpus(path, path.stem, columns, tokenized, partial(_by_position, path, columns))


@dataclass(frozen=True)
class _Columns:
    """Languages and header of tables with two columns."""

    files: Sequence[Path]
    languages: LanguagePair
    has_header: bool
    target_is_first: bool = False

    def read(self, path: Path) -> Iterator[TextPair]:
        """Yield the pairs of one table, source first."""
        for first, second in read_columns(path, has_header=self.has_header):
            yield (second, first) if self.target_is_first else (first, second)


def _columns(files: Sequence[Path], asked: str | None) -> _Columns:
    headers = [header_languages(next(read_lines(path)), asked) for path in files]
    header = headers[0]
    for path, other in zip(files, headers, strict=True):
        if other != header:
            raise InputError(
                f"{files[0]} and {path} differ in their first lines, {_named(header)} and "
                f"{_named(other)}: give all files the same header, or no header"
            )
    if header is None:
        return _Columns(files, language_pair(asked) if asked else _COLUMNS, has_header=False)
    if asked is None or same_languages(asked, *header):
        return _Columns(files, header, has_header=True)
    if same_languages(asked, *header[::-1]):
        return _Columns(files, header[::-1], has_header=True, target_is_first=True)
    raise InputError(
        f"data.languages={asked}: the columns of {files[0]} are {header[0]} and {header[1]} by its "
        f"first line; set data.languages={'-'.join(header)} or {'-'.join(header[::-1])}, or fix "
        "that line"
    )


def _named(header: LanguagePair | None) -> str:
    return "which is no header" if header is None else f"the header {header[0]}, {header[1]}"


def _corpus(
    path: Path,
    name: str,
    columns: _Columns,
    tokenized: bool,
    read: Callable[[Split], Iterator[TextPair]],
) -> ParallelCorpus:
    return ParallelCorpus(
        name=name,
        source=str(path),
        license=USER_LICENSE,
        source_language=columns.languages[0],
        target_language=columns.languages[1],
        tokenized=tokenized,
        read=read,
        hash_content=partial(hash_files, columns.files),
    )


def _by_position(path: Path, columns: _Columns, split: Split) -> Iterator[TextPair]:
    number = -1
    for number, pair in enumerate(columns.read(path)):
        if split_of(number) == split:
            yield pair
    if number + 1 < TWENTY.length:
        raise InputError(
            f"{path} has {number + 1} lines: at least {TWENTY.length} are needed to set some aside "
            "for validation and test"
        )


def read_parallel(path: Path, languages: str | None, *, tokenized: bool) -> ParallelCorpus:
    """Find the user's sentence pairs; the contents of files are checked when they are read.

    Args:
        path: folder, train file or file of pairs.
        languages: source and target language, as `de-en`; labels for columns without a header.
        tokenized: whether the lines are tokenized, with spaces between tokens.

    Raises:
        InputError: there are no such files, splits or languages.
    """
    if path.is_dir():
        return _read_folder(path, languages, tokenized)
    check_decompressed(path)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with train.de, train.en, valid.de and so on, a "
            "file of sentence pairs with tabs between them, hf:NAME, or verses, which are embedded"
        )
    file = side_file(path)
    if file:
        check_train_side(file)
        return _read_sides(path, file, languages, tokenized)
    return read_table(path, languages, tokenized=tokenized)


def _read_folder(folder: Path, languages: str | None, tokenized: bool) -> ParallelCorpus:
    sides, tables = side_files(folder), _TABLES.of(folder, "")
    has_train = any(file.split == "train" for file in sides)
    if has_train and "train" in tables:
        raise InputError(
            f"{folder} holds both {tables['train'].name} and train files of languages: give the "
            "path of one of them"
        )
    if tables and not has_train:
        return read_tables(folder, languages, tokenized=tokenized)
    if not sides:
        raise not_found(
            folder,
            f"{folder} holds no sentence pairs: expected train.de, train.en, valid.de and so on, "
            "or train.tsv, valid.tsv and test.tsv",
        )
    return _read_sides(folder, None, languages, tokenized)


def _read_sides(
    path: Path, train: SideFile | None, languages: str | None, tokenized: bool
) -> ParallelCorpus:
    folder = path if train is None else path.parent
    found = side_files(folder)
    pair = choose_languages(found, languages, path, train)
    files = choose_files(found, pair, path, train)
    name = side_file(files["train"][0])
    return ParallelCorpus(
        name=(name.name if name else "") or folder.resolve().name,
        source=str(folder),
        license=USER_LICENSE,
        source_language=pair[0],
        target_language=pair[1],
        tokenized=tokenized,
        read=lambda split: read_line_pairs(*files[split]),
        hash_content=partial(hash_files, list(chain.from_iterable(files.values()))),
    )


# Pairs of lines.


def read_line_pairs(source: Path, target: Path) -> Iterator[TextPair]:
    """Yield pairs of corresponding lines of two files.

    Raises:
        InputError: as `read_lines`, or one file has more lines than the other.
    """
    sources, targets = read_lines(source), read_lines(target)
    number = 0
    for line in sources:
        other = next(targets, None)
        if other is None:
            raise _different(source, number + 1 + _count(sources), target, number)
        number += 1
        yield line, other
    if rest := _count(targets):
        raise _different(source, number, target, number + rest)


def read_columns(path: Path, *, has_header: bool = False) -> Iterator[TextPair]:
    """Yield the two columns of a tab-separated file; blank lines are empty pairs.

    Args:
        path: path of the file.
        has_header: whether to skip the first line.

    Raises:
        InputError: as `read_lines`, or a line does not have exactly one tab.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if has_header and number == 1:
            continue
        columns = line.split("\t")
        if len(columns) == 2:
            yield columns[0], columns[1]
        elif not line.strip():
            yield "", ""
        else:
            raise InputError(
                f"{path}, line {number}: {len(columns) - 1} tabs; expected one, between a sentence "
                "and its translation"
            )


def refuse_pieces(pairs: Iterator[TextPair], source: str) -> Iterator[TextPair]:
    """Yield the pairs unless their words are split into subwords already.

    Translations would then be scored on subwords, which are not comparable with scores on words.

    Args:
        pairs: the pairs.
        source: name of their source, for the message.

    Raises:
        InputError: more than a quarter of the first lines have subword marks.
    """
    first = list(islice(pairs, _SAMPLE))
    for mark, (name, fix) in _PIECE_MARKS.items():
        if _share(first, mark) > 1 / 4:
            raise InputError(
                f"{source} holds pieces of words ({mark.strip()!r}, as {name} writes them): {fix} "
                "the text before that step"
            )
    yield from first
    yield from pairs


def require_pieces(pairs: Iterator[TextPair], source: str) -> Iterator[TextPair]:
    """Yield the pairs if their words are split into subwords by subword-nmt.

    Raises:
        InputError: none of the first lines has its mark.
    """
    first = list(islice(pairs, _SAMPLE))
    if first and not _share(first, _SUBWORD_NMT):
        raise InputError(
            f"{source} holds no pieces of words ({_SUBWORD_NMT.strip()!r}): data.subwords=split "
            "needs every split segmented by the same codes; for words set data.subwords to the "
            "path of the codes or to learned"
        )
    yield from first
    yield from pairs


def _share(pairs: Sequence[TextPair], mark: str) -> float:
    return sum(mark in source or mark in target for source, target in pairs) / max(1, len(pairs))


def hash_files(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files, independent of their names.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        one = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    one.update(chunk)
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror}): expected a UTF-8 text file"
            ) from error
        digest.update(one.digest())
    return digest.hexdigest()


def _count(lines: Iterator[str]) -> int:
    return sum(1 for _ in lines)


def _different(source: Path, num_source: int, target: Path, num_target: int) -> InputError:
    return InputError(
        f"{source} has {num_source} lines and {target} has {num_target}: expected one sentence on "
        "each line, and its translation on the same line of the other file"
    )
