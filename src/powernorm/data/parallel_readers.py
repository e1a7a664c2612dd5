"""Reading the user's sentence pairs: two files a split, or two columns.

`read_parallel` takes

- a folder with a file for each language and split, named as `parallel_layouts` says, or the path of
  one of its train files.
- a folder with `train.tsv`, `valid.tsv` (or `dev.tsv`) and `test.tsv`, a sentence and its
  translation in each line with a tab between them, or the path of that `train.tsv`.
- any other such file, split by position: of every 20 lines the 10th is valid and the 20th test.

Nothing is read before it is needed, and nothing is kept.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from powernorm.data.corpus import (
    SPLIT_PERIOD,
    SPLITS,
    TEST_REMAINDER,
    VALID_REMAINDER,
    Split,
)
from powernorm.data.parallel_corpus import ParallelCorpus, TextPair
from powernorm.data.parallel_layouts import (
    choose_files,
    choose_languages,
    is_train,
    side_file,
    side_files,
)
from powernorm.data.parallel_lines import hash_files, read_columns, read_line_pairs, refuse_pieces
from powernorm.data.readers import USER_LICENCE
from powernorm.errors import InputError

_LANGUAGES: Final = re.compile(r"(?P<source>\w+)-(?P<target>\w+)", re.ASCII)
_COLUMNS: Final = ("source", "target")
"""Languages of two columns that nobody has named."""
_TSV_NAMES: Final[Mapping[Split, tuple[str, ...]]] = {
    "train": ("train.tsv",),
    "valid": ("valid.tsv", "dev.tsv"),
    "test": ("test.tsv",),
}


def language_pair(languages: str) -> tuple[str, str]:
    """Return source and target of a pair of languages such as `de-en`.

    Raises:
        InputError: it is no such pair, or both are the same.
    """
    match = _LANGUAGES.fullmatch(languages)
    if not match or match["source"] == match["target"]:
        raise InputError(
            f"data.languages={languages!r} is no pair of languages: give the source and the "
            "target, as de-en."
        )
    return match["source"], match["target"]


def read_parallel(
    path: Path, languages: tuple[str, str] | None, *, tokenised: bool
) -> ParallelCorpus:
    """Find the user's sentence pairs; what is in the files is checked when it is read.

    Args:
        path: folder, train file or file of pairs.
        languages: of source and target; of columns, the names of the first and the second.
        tokenised: whether the lines are tokens with spaces between them.

    Raises:
        InputError: there are no such files, splits or languages.
    """
    if path.is_dir():
        return _read_folder(path, languages, tokenised)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with train.de, train.en, valid.de and so on, a "
            "file of sentence pairs with tabs between them, hf:NAME, or verses, which are embedded."
        )
    file = side_file(path)
    if file and is_train(file):
        return _read_sides(path, languages, tokenised)
    if path.name in _TSV_NAMES["train"] and len(_tsv_files(path.parent)) > 1:
        return _read_tables(path.parent, languages, tokenised)
    return _read_table(path, languages, tokenised)


def _read_folder(
    folder: Path, languages: tuple[str, str] | None, tokenised: bool
) -> ParallelCorpus:
    has_sides = any(map(is_train, side_files(folder)))
    tables = _tsv_files(folder)
    if has_sides and "train" in tables:
        raise InputError(
            f"{folder} holds both {tables['train'].name} and train files of languages: give the "
            "path of one of them."
        )
    if tables and not has_sides:
        return _read_tables(folder, languages, tokenised)
    if not side_files(folder):
        raise InputError(
            f"{folder} holds no sentence pairs: expected train.de, train.en, valid.de and so on, "
            "or train.tsv, valid.tsv and test.tsv."
        )
    return _read_sides(folder, languages, tokenised)


def _read_sides(path: Path, languages: tuple[str, str] | None, tokenised: bool) -> ParallelCorpus:
    train = None if path.is_dir() else side_file(path)
    folder = path if train is None else path.parent
    found = side_files(folder)
    if train:
        # The other side of the same train split, whatever else is in the folder.
        same = [file for file in found if (file.name, file.middle) == (train.name, train.middle)]
        pair = choose_languages(same, languages, path)
    else:
        pair = choose_languages(found, languages, path)
    files = choose_files(found, pair, path, train)
    name = side_file(files["train"][0])
    return ParallelCorpus(
        name=(name.name if name else "") or folder.resolve().name,
        source=str(folder),
        licence=USER_LICENCE,
        source_language=pair[0],
        target_language=pair[1],
        tokenised=tokenised,
        read=lambda split: refuse_pieces(read_line_pairs(*files[split]), files[split][0]),
        hash_content=partial(hash_files, list(chain.from_iterable(files.values()))),
    )


def _tsv_files(folder: Path) -> dict[Split, Path]:
    found: dict[Split, Path] = {}
    for split, names in _TSV_NAMES.items():
        paths = [folder / name for name in names if (folder / name).exists()]
        if len(paths) > 1:
            both = " and ".join(path.name for path in paths)
            raise InputError(f"{folder} has two {split} splits, {both}: leave one of them.")
        if paths:
            found[split] = paths[0]
    return found


def _read_tables(
    folder: Path, languages: tuple[str, str] | None, tokenised: bool
) -> ParallelCorpus:
    files = _tsv_files(folder)
    for split in SPLITS:
        if split not in files:
            raise InputError(
                f"{folder} has no {split} split: expected {' or '.join(_TSV_NAMES[split])} beside "
                "the others."
            )
    return _table(
        folder,
        folder.resolve().name,
        languages,
        tokenised,
        lambda split: read_columns(files[split]),
        [files[split] for split in SPLITS],
    )


def _read_table(path: Path, languages: tuple[str, str] | None, tokenised: bool) -> ParallelCorpus:
    return _table(path, path.stem, languages, tokenised, partial(_by_position, path), [path])


def _table(
    path: Path,
    name: str,
    languages: tuple[str, str] | None,
    tokenised: bool,
    read: Callable[[Split], Iterator[TextPair]],
    files: list[Path],
) -> ParallelCorpus:
    source, target = languages or _COLUMNS
    return ParallelCorpus(
        name=name,
        source=str(path),
        licence=USER_LICENCE,
        source_language=source,
        target_language=target,
        tokenised=tokenised,
        read=read,
        hash_content=partial(hash_files, files),
    )


def _by_position(path: Path, split: Split) -> Iterator[TextPair]:
    remainders: dict[int, Split] = {VALID_REMAINDER: "valid", TEST_REMAINDER: "test"}
    number = -1
    for number, pair in enumerate(read_columns(path)):
        if remainders.get(number % SPLIT_PERIOD, "train") == split:
            yield pair
    if number + 1 < SPLIT_PERIOD:
        raise InputError(
            f"{path} has {number + 1} lines: at least {SPLIT_PERIOD} are needed to set some aside "
            "for validation and test."
        )
