"""Which files of a folder hold the two sides of each split, by the names of official corpora.

A file is called `[NAME.]SPLIT[.MIDDLE].LANGUAGE`: `train.de`, `iwslt14.train.de`, `valid.de-en.de`,
`train.tok.clean.bpe.32000.de`. SPLIT is train, valid, dev, val or test; where those are missing,
tst2012 is valid and tst2013 test (IWSLT15), newstest2013 is valid and newstest2014 test (WMT).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from powernorm.data.corpus import SPLITS, Split
from powernorm.errors import InputError

_LANGUAGE: Final = r"[A-Za-z]{2,3}(?:[_-][A-Za-z]+)*"
_NAMES: Final[Mapping[Split, tuple[tuple[str, ...], ...]]] = MappingProxyType(
    {
        "train": (("train",),),
        "valid": (("valid", "dev", "val"), ("tst2012", "newstest2013")),
        "test": (("test",), ("tst2013", "newstest2014")),
    }
)
"""Of the files of each split; the later ones where there are none of the earlier."""
_WORDS: Final = "|".join(word for tiers in _NAMES.values() for tier in tiers for word in tier)
_FILE: Final = re.compile(
    rf"^(?:(?P<name>.+?)\.)?(?P<word>{_WORDS})(?:\.(?P<middle>.+))?\.(?P<language>{_LANGUAGE})$"
)
_NO_LANGUAGES: Final = frozenset(
    {"bz", "bz2", "csv", "dat", "gz", "idx", "ids", "log", "md", "pkl", "pt", "py", "raw", "sh",
     "sgm", "tsv", "txt", "xml", "xz", "zip"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SideFile:
    """One side of a split, as the name of its file tells."""

    path: Path
    name: str
    word: str
    middle: str
    language: str


def side_file(path: Path) -> SideFile | None:
    """Return what a file's name says; None for the name of no such file."""
    match = _FILE.match(path.name)
    if not match or match["language"] in _NO_LANGUAGES:
        return None
    return SideFile(
        path, match["name"] or "", match["word"], match["middle"] or "", match["language"]
    )


def side_files(folder: Path) -> list[SideFile]:
    """Return the sides of splits in a folder, by name."""
    found = (side_file(path) for path in sorted(folder.iterdir()))
    return [file for file in found if file]


def is_train(file: SideFile) -> bool:
    """Return whether the file is one side of a train split."""
    return file.word in _NAMES["train"][0]


def choose_languages(
    files: Sequence[SideFile], languages: tuple[str, str] | None, source: Path
) -> tuple[str, str]:
    """Return `languages` if the train split has both.

    Raises:
        InputError: it has not, or `languages` is None: which side is the source is never guessed.
    """
    found = sorted({file.language for file in files if is_train(file)})
    if languages is None:
        raise missing_languages(found, str(source))
    absent = [language for language in languages if language not in found]
    if absent:
        raise InputError(
            f"data.languages={'-'.join(languages)}: {source} has no train split in "
            f"{' and '.join(absent)}, only in {', '.join(found) or 'no language'}; expected "
            f"train.{languages[0]} and train.{languages[1]}."
        )
    return languages


def missing_languages(found: Sequence[str], source: str) -> InputError:
    """Return the error where nobody said which language is the source."""
    if len(found) == 2:
        choice = f"{found[0]}-{found[1]} or {found[1]}-{found[0]}"
    else:
        choice = "source and target, as de-en"
    return InputError(
        f"{source} is in {', '.join(found) or 'no known language'}, and nothing says which is "
        f"translated into which: set data.languages={choice}."
    )


def choose_files(
    files: Sequence[SideFile], languages: tuple[str, str], source: Path, train: SideFile | None
) -> dict[Split, tuple[Path, Path]]:
    """Return the two files of every split.

    Args:
        files: of the folder.
        languages: of source and target.
        source: what the user gave, for messages.
        train: one side of the train split that is meant; None where there is but one.

    Raises:
        InputError: a split is missing, or several files could be it.
    """
    chosen: dict[Split, tuple[Path, Path]] = {}
    for split in SPLITS:
        first, second = (
            _one(_candidates(files, split, language, train), split, language, source)
            for language in languages
        )
        chosen[split] = first.path, second.path
        if split == "train":
            # From here on the neighbours of what was chosen are meant.
            train = first
    return chosen


def _candidates(
    files: Iterable[SideFile], split: Split, language: str, train: SideFile | None
) -> list[SideFile]:
    in_language = [file for file in files if file.language == language]
    found: list[SideFile] = []
    for tier in _NAMES[split]:
        found = [file for file in in_language if file.word in tier]
        if found:
            break
    if train is None:
        return found
    same_name = [file for file in found if file.name == train.name] or found
    if split == "train":
        return [file for file in found if (file.name, file.middle) == (train.name, train.middle)]
    return [file for file in same_name if file.middle == train.middle] or same_name


def _one(found: list[SideFile], split: Split, language: str, source: Path) -> SideFile:
    if not found:
        names = ", ".join(f"{word}.{language}" for tier in _NAMES[split] for word in tier)
        raise InputError(
            f"{source} has no {split} split in {language}: expected one of {names}, beside the "
            "others."
        )
    if len(found) > 1:
        names = ", ".join(file.path.name for file in found)
        mend = "give the path of one" if split == "train" else "leave one of them"
        raise InputError(f"{source} has several {split} splits in {language} ({names}): {mend}.")
    return found[0]
