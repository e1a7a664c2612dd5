"""Readers of the user's sentence pairs: two files for each split, or two columns.

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

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, TWENTY, Split, split_of
from powernorm_lab.data.lines import TextPair, hash_files, read_columns, read_line_pairs, read_lines
from powernorm_lab.data.readers import USER_LICENSE
from powernorm_lab.data.split_files import SplitFiles
from powernorm_lab.tasks.translation.corpus import ParallelCorpus
from powernorm_lab.tasks.translation.languages import (
    LanguagePair,
    header_languages,
    language_pair,
    same_languages,
)
from powernorm_lab.tasks.translation.layouts import (
    SideFile,
    check_decompressed,
    check_train_side,
    choose_files,
    choose_languages,
    not_found,
    side_file,
    side_files,
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
