"""Text files, line by line, and the files of a data set in three splits."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, TEN, Split, split_by_position

USER_LICENSE: Final = "the user's own data"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without a byte order mark.

    Raises:
        InputError: the file cannot be read, is not UTF-8 text or is empty.
    """
    number = 0
    try:
        # str methods would also break lines at form feeds, U+2028 and the like.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                yield _text(content.removesuffix(b"\n").removesuffix(b"\r"), path, number)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected a UTF-8 text file"
        ) from error
    if not number:
        raise InputError(f"{path} is empty: expected text")


def read_text(path: Path) -> str:
    r"""Read a UTF-8 file, with "\n" at the ends of lines.

    Raises:
        InputError: the file cannot be read, is not UTF-8 text or is empty.
    """
    text = "\n".join(read_lines(path))
    if not text.strip():
        raise InputError(f"{path} is empty: expected text")
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return f"{text}\n" if file.read() == b"\n" else text


def _text(content: bytes, path: Path, number: int) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: byte 0x{content[error.start]:02x} is not UTF-8 text; convert "
            "the file to UTF-8"
        ) from error
    if "\x00" in text:
        raise InputError(f"{path}, line {number}: a zero byte; expected a UTF-8 text file")
    return text


_SPLITS: Final[dict[str, Split]] = {
    "train": "train",
    "valid": "valid",
    "dev": "valid",
    "testa": "valid",
    "testb": "test",
    "test": "test",
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class SplitFiles:
    """Naming scheme of the files of one kind of data set.

    Attributes:
        pattern: pattern of a file's name, with the groups `name` (of the data set, optional) and
            `split`.
        expected: description of such names, for messages.
        what: name of the kind in the plural, for messages.
        optional: splits that may be missing.
    """

    pattern: re.Pattern[str]
    expected: str
    what: str
    optional: tuple[Split, ...] = ()

    def names(self, folder: Path) -> set[str]:
        """Return the names of the data sets in a folder; "" for files without a name."""
        matches = (self.pattern.fullmatch(path.name) for path in folder.iterdir())
        return {match["name"] or "" for match in matches if match}

    def only_name(self, names: Collection[str], folder: Path) -> str | None:
        """Return the name of the only data set in a folder; None if there is none.

        Raises:
            InputError: there are several.
        """
        if len(names) > 1:
            found = ", ".join(sorted(name or "train" for name in names))
            raise InputError(
                f"{folder} holds several {self.what} ({found}): give the path of the train file of "
                "one"
            )
        return next(iter(names), None)

    def train_name(self, path: Path) -> str | None:
        """Return the name of the data set whose train split a file is; None for other files."""
        match = self.pattern.fullmatch(path.name)
        return (match["name"] or "") if match and match["split"].lower() == "train" else None

    def of(self, folder: Path, name: str) -> dict[Split, Path]:
        """Return the file of each split of a data set.

        Raises:
            InputError: a split has no file or several.
        """
        found: dict[Split, list[Path]] = {split: [] for split in SPLITS}
        for path in sorted(folder.iterdir()):
            match = self.pattern.fullmatch(path.name)
            if match and (match["name"] or "") == name:
                found[_SPLITS[match["split"].lower()]].append(path)
        for split, paths in found.items():
            if len(paths) > 1 or (not paths and split not in self.optional):
                held = " and ".join(path.name for path in paths) or "none"
                raise InputError(
                    f"{folder} must hold one {split} split of {name or 'the data set'}, found "
                    f"{held}: expected {self.expected}"
                )
        return {split: paths[0] for split, paths in found.items() if paths}


def split_sentences(sentences: Sequence[_T], source: Path) -> dict[Split, tuple[_T, ...]]:
    """Split the sentences of one file: of every ten the ninth is valid and the tenth test.

    Raises:
        InputError: there are fewer than ten sentences.
    """
    if len(sentences) < TEN.length:
        raise InputError(
            f"{source} has {len(sentences)} sentences: at least {TEN.length} are needed to set "
            "some aside for validation and test"
        )
    return split_by_position(sentences, TEN)
