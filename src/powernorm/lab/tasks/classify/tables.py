"""Tables of texts: a line each, class and text with a tab between them.

A first line with `label` and `sentence` (or `text`) names the columns, in either order, and there
may be others, or those that `columns.Columns` names; without one a line is class, tab, text.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.data.corpus import Split
from powernorm.lab.data.lines import read_lines
from powernorm.lab.data.readers import USER_LICENSE
from powernorm.lab.tasks.classify.columns import ColumnPlaces, Columns
from powernorm.lab.tasks.classify.labeled_texts import (
    LEAST,
    LabeledText,
    LabeledTexts,
    Read,
    shuffled_parts,
    with_drawn_valid,
)

TABLE_NAMES: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("train.tsv", "train.txt"),
    "valid": ("valid.tsv", "dev.tsv", "valid.txt", "dev.txt"),
    "test": ("test.tsv", "test.txt"),
}


def table_file(folder: Path, split: Split) -> Path | None:
    """Return the table of a split, None where there is none.

    Raises:
        InputError: there are two.
    """
    found = [folder / name for name in TABLE_NAMES[split] if (folder / name).exists()]
    if len(found) > 1:
        both = " and ".join(path.name for path in found)
        raise InputError(f"{folder} has two {split} splits, {both}: leave one of them")
    return found[0] if found else None


def read_tables(folder: Path, columns: Columns) -> LabeledTexts:
    """Read a table for each split; without one for valid, that is drawn out of train.

    Raises:
        InputError: there is no table for train or test.
    """
    paths = {split: table_file(folder, split) for split in TABLE_NAMES}
    train, valid, test = paths["train"], paths["valid"], paths["test"]
    if train is None or test is None:
        missing: Split = "test" if train is not None else "train"
        raise InputError(
            f"{folder} has no {missing} split: expected {' or '.join(TABLE_NAMES[missing])} "
            "beside the others"
        )
    read_train, read_test = partial(_rows, train, columns), partial(_rows, test, columns)
    splits: dict[Split, Read] = with_drawn_valid(read_train, read_test)
    if valid is not None:
        read_valid = partial(_rows, valid, columns)
        splits = {"train": read_train, "valid": read_valid, "test": read_test}
    return LabeledTexts(folder.resolve().name, str(folder), USER_LICENSE, splits)


def read_table(path: Path, columns: Columns) -> LabeledTexts:
    """Read one table and divide it at random in the proportions of RT.

    Raises:
        InputError: it is damaged, or has too few lines.
    """
    return divided_texts(path, _rows(path, columns))


def divided_texts(path: Path, rows: Iterable[LabeledText]) -> LabeledTexts:
    """Return the texts of one file, divided at random in the proportions of RT.

    Raises:
        InputError: there are too few.
    """
    texts = list(rows)
    if len(texts) < LEAST:
        raise InputError(
            f"{path} has {len(texts)} texts: at least {LEAST} are needed to set some aside for "
            "validation and test"
        )
    return LabeledTexts(path.stem, str(path), USER_LICENSE, shuffled_parts(texts))


def _rows(path: Path, columns: Columns) -> Iterator[LabeledText]:
    num_columns, places = 2, ColumnPlaces(0, (1,))
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.split("\t")
        if number == 1 and (found := columns.found_in(cells, path)) is not None:
            num_columns, places = len(cells), found
            continue
        if not line.strip():
            continue
        if len(cells) != num_columns:
            raise InputError(
                f"{path}, line {number}: {len(cells)} columns; expected {num_columns} with tabs "
                "between them, a class and a text"
            )
        label = cells[places.label].strip()
        if not label:
            raise InputError(
                f"{path}, line {number}, column {places.label + 1}: no class; expected its name"
            )
        yield LabeledText(label, places.text(cells), path, number)
