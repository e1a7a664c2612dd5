"""Reading the user's sentence pairs: two files a split, or two columns.

`read_parallel` takes

- a folder with a file for each language and split, named as `layouts` says, or the path of
  one of its train files.
- a folder with `train.tsv`, `valid.tsv` (or `dev.tsv`) and `test.tsv`, a sentence and its
  translation in each line with a tab between them, or the path of that `train.tsv`.
- any other such file, split by position: of every 20 lines the 10th is valid and the 20th test.

But for the first lines of tables, nothing is read before it is needed, and nothing is kept.
"""

from functools import partial
from itertools import chain
from pathlib import Path

from powernorm.errors import InputError
from powernorm.lab.data.lines import hash_files, read_line_pairs
from powernorm.lab.data.readers import USER_LICENSE
from powernorm.lab.tasks.translation.corpus import ParallelCorpus
from powernorm.lab.tasks.translation.layouts import (
    SideFile,
    check_decompressed,
    check_train_side,
    choose_files,
    choose_languages,
    not_found,
    side_file,
    side_files,
)
from powernorm.lab.tasks.translation.tables import read_table, read_tables, table_files


def read_parallel(path: Path, languages: str | None, *, tokenized: bool) -> ParallelCorpus:
    """Find the user's sentence pairs; what is in the files is checked when it is read.

    Args:
        path: folder, train file or file of pairs.
        languages: source and target, as `de-en`; of columns without a header, their names.
        tokenized: whether the lines are tokens with spaces between them.

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
    sides, tables = side_files(folder), table_files(folder)
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
