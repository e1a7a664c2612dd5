"""Language codes, and files of the two sides of each split by the names of official corpora.

Names have the form `[NAME.]SPLIT[.MIDDLE].LANGUAGE`: `train.de`, `iwslt14.train.de`,
`valid.de-en.de`, `train.tok.clean.bpe.32000.de`. SPLIT is train, valid, dev, val or test; if those
are missing, tst2012 is valid and tst2013 test (IWSLT15), newstest2013 is valid and newstest2014
test (WMT). The two sides of a split differ only in the language. If there are several candidates,
the one with neither NAME nor MIDDLE is used, because scripts that prepare a corpus leave the files
of earlier steps in the same folder.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, Split

LanguagePair = tuple[str, str]
"""The languages of source and target."""

FILE_LANGUAGE: Final = r"[A-Za-z]{2,3}(?:[_-][A-Za-z0-9]+)*"
"""Pattern of language codes at the ends of file names: `de`, `deu`, `zh_CN`, `pt-br`."""
_PAIR: Final = re.compile(r"\w+(?:-\w+)+", re.ASCII)
_HEADER: Final = re.compile(r"(?P<code>[a-z]{2})(?:[_-][A-Za-z0-9]+)*")
_ISO_639_1: Final = (
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy "
    "da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu "
    "hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb "
    "lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om "
    "or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw "
    "ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"
)
_MOST_PAIRS_SHOWN: Final = 12


def check_languages(languages: str) -> None:
    """Check that a string is two different languages with a hyphen between them, such as `de-en`.

    Raises:
        InputError: it is not.
    """
    if not _PAIR.fullmatch(languages) or not _readings(languages):
        raise InputError(
            f"data.languages={languages!r} is no pair of languages: give the source and the "
            "target, as de-en"
        )


def language_pair(languages: str, found: Collection[str] = ()) -> LanguagePair:
    """Return source and target of a pair of languages such as `de-en` or `pt-br-en`.

    Args:
        languages: the pair.
        found: languages of the data, which resolve the ambiguity of hyphens; the result need not be
            among them.

    Raises:
        InputError: it is no pair of different languages, or is ambiguous.
    """
    check_languages(languages)
    readings = _readings(languages)
    # Prefer the reading with the most known languages, then the longest codes (pt-br over pt).
    known = [[language for language in pair if language in found] for pair in readings]
    ranks = [(len(languages), len("".join(languages))) for languages in known]
    best = [pair for pair, rank in zip(readings, ranks, strict=True) if rank == max(ranks)]
    if len(best) > 1 and (max(ranks)[0] == 2 or not found):
        ways = " or ".join(" and ".join(pair) for pair in best)
        raise InputError(
            f"data.languages={languages} may be {ways}: write the languages without hyphens, as "
            "pt_br (also in the names of files)"
        )
    return best[0]


def is_joined(language: str, found: Collection[str]) -> bool:
    """Return whether this is a pair of languages of `found`, for files with both languages."""
    return any(set(pair) <= set(found) for pair in _readings(language))


def header_languages(line: str, asked: str | None) -> LanguagePair | None:
    """Return the languages of a header with two columns; None if the line is a sentence pair.

    Args:
        line: the first line, with a tab between its columns.
        asked: languages that the user has given, which need not be known codes.
    """
    first, tab, second = line.partition("\t")
    if not tab or first == second:
        return None
    codes = [_HEADER.fullmatch(cell) for cell in (first, second)]
    is_known = all(match and match["code"] in _ISO_639_1.split() for match in codes)
    named = same_languages(asked, first, second) or same_languages(asked, second, first)
    return (first, second) if is_known or named else None


def same_languages(asked: str | None, source: str, target: str) -> bool:
    """Return whether the user gave these languages, ignoring case and kind of hyphen."""
    return asked is not None and _plain(asked) == _plain(f"{source}-{target}")


def missing_languages(pairs: Iterable[LanguagePair], source: str) -> InputError:
    """Return the error for data with several pairs of languages and no choice.

    Args:
        pairs: the pairs of the data, at least one.
        source: name of the data.
    """
    choices = sorted(set(pairs))
    found = sorted({language for pair in choices for language in pair})
    names = ["-".join(pair) for pair in choices[:_MOST_PAIRS_SHOWN]]
    last = names.pop() if len(choices) <= _MOST_PAIRS_SHOWN else "another pair of these"
    return InputError(
        f"{source} is in {', '.join(found)}, with no direction of translation given: set "
        f"data.languages={', '.join(names)} or {last}"
    )


def pairs_of(languages: Iterable[str]) -> list[LanguagePair]:
    """Return all ordered pairs of different languages."""
    return list(permutations(sorted(set(languages)), 2))


def _readings(languages: str) -> Sequence[LanguagePair]:
    parts = languages.split("-")
    pairs = [("-".join(parts[:n]), "-".join(parts[n:])) for n in range(1, len(parts))]
    return [pair for pair in pairs if pair[0] != pair[1]]


def _plain(language: str) -> str:
    return language.casefold().replace("_", "-")


# Files of the two sides of each split.


_NAMES: Final[Mapping[Split, tuple[tuple[str, ...], ...]]] = MappingProxyType(
    {
        "train": (("train",),),
        "valid": (("valid", "dev", "val"), ("tst2012", "newstest2013")),
        "test": (("test",), ("tst2013", "newstest2014")),
    }
)
"""Names of each split; later groups are used if there are no files of the earlier ones."""
_WORDS: Final = "|".join(word for tiers in _NAMES.values() for tier in tiers for word in tier)
_FILE: Final = re.compile(
    rf"^(?:(?P<name>.+?)\.)?(?P<word>{_WORDS})(?:\.(?P<middle>.+))?\.(?P<language>{FILE_LANGUAGE})$"
)
_COMPRESSED: Final = (".gz", ".xz", ".bz2", ".zst", ".zip", ".tgz")
_NO_LANGUAGES: Final = frozenset(
    {"bak", "bin", "bz", "csv", "dat", "ids", "idx", "log", "md", "npy", "npz", "pkl", "py", "raw",
     "sgm", "sh", "tar", "tsv", "txt", "xml", *(suffix[1:] for suffix in _COMPRESSED)}
)  # fmt: skip
_MOST_FILES_SHOWN: Final = 6


@dataclass(frozen=True, slots=True)
class SideFile:
    """One side of a split, parsed from the name of its file."""

    path: Path
    name: str
    word: str
    middle: str
    language: str

    @property
    def stem(self) -> tuple[str, str, str]:
        """Return the parts of the name that both sides of a split share."""
        return self.name, self.word, self.middle

    @property
    def split(self) -> Split:
        """Return the split of the file."""
        return next(
            split for split, tiers in _NAMES.items() if any(self.word in tier for tier in tiers)
        )


def side_file(path: Path) -> SideFile | None:
    """Parse a file's name; return None if it is not that of a side."""
    match = _FILE.match(path.name)
    if not match or match["language"] in _NO_LANGUAGES:
        return None
    return SideFile(
        path, match["name"] or "", match["word"], match["middle"] or "", match["language"]
    )


def side_files(folder: Path) -> list[SideFile]:
    """Return the sides of splits in a folder, by name.

    A file `train.en-de` next to `train.en` and `train.de` holds both languages and is not a side.
    """
    found = [file for file in map(side_file, sorted(folder.iterdir())) if file]
    languages = {file.language for file in found}
    return [file for file in found if not is_joined(file.language, languages)]


def not_found(folder: Path, message: str) -> InputError:
    """Return the error for missing files, with advice if there are compressed ones."""
    packed = [
        path.name
        for path in sorted(folder.iterdir())
        if path.suffix in _COMPRESSED and not path.with_suffix("").exists()
    ]
    if not packed:
        return InputError(message)
    names = ", ".join(packed[:_MOST_FILES_SHOWN]) + (
        ", …" if len(packed) > _MOST_FILES_SHOWN else ""
    )
    return InputError(f"{message} Compressed files are not read: decompress {names}")


def check_decompressed(path: Path) -> None:
    """Check that a file, which may be missing, is not compressed.

    Raises:
        InputError: the file is compressed, or only a compressed version exists.
    """
    candidates = [path, *(path.with_name(path.name + suffix) for suffix in _COMPRESSED)]
    packed = next((one for one in candidates if one.is_file()), path)
    if packed.suffix in _COMPRESSED and packed.is_file():
        raise InputError(
            f"{packed} is compressed: decompress it and give the resulting file or folder"
        )


def check_train_side(file: SideFile) -> None:
    """Check that the user's path is one side of a train split.

    Raises:
        InputError: the file is of another split, or holds two languages.
    """
    folder = file.path.parent
    sides = [side for side in side_files(folder) if side.split == "train"]
    if file not in side_files(folder):
        known = [side.path.name for side in sides if (side.name, side.middle) == ("", "")]
        raise InputError(
            f"{file.path} has the name of two languages in one file ({file.language}): give the "
            f"folder {folder} or one side, as {' or '.join(known) or 'train.de'}"
        )
    if file.split != "train":
        own = [side for side in sides if side.language == file.language]
        beside = sorted(own, key=lambda side: (side.name != file.name, side.middle != file.middle))
        fix = f" or its {beside[0].path.name}" if beside else ", with train files in it"
        raise InputError(
            f"{file.path} is one side of the {file.split} split: give the folder {folder}{fix}"
        )


def choose_languages(
    files: Sequence[SideFile], languages: str | None, source: Path, train: SideFile | None
) -> LanguagePair:
    """Return source and target language of `languages` if the train split has both.

    Args:
        files: sides in the folder.
        languages: languages given by the user.
        source: path given by the user, for messages.
        train: side of the train split given by the user; None for a folder.

    Raises:
        InputError: a language is missing, or `languages` is None: the direction is never guessed.
    """
    own = [file for file in files if file.split == "train"]
    if train:
        # Only the other sides of this train split; the folder may hold others.
        own = [file for file in own if file.stem == train.stem]
    found = sorted({file.language for file in own})
    if languages is None:
        raise _no_languages(own, source, train)
    pair = language_pair(languages, found)
    absent = [language for language in pair if language not in found]
    if absent:
        raise not_found(
            _folder(source),
            f"data.languages={languages}: {source} has no train split in {' and '.join(absent)}, "
            f"only in {', '.join(found) or 'no language'}; expected train.{pair[0]} and "
            f"train.{pair[1]}",
        )
    if train and train.language not in pair:
        other = " or ".join(file.path.name for file in own if file.language in pair)
        raise InputError(
            f"data.languages={languages}: {source} is in {train.language}; give the path of "
            f"{other}, or a pair of languages with {train.language}"
        )
    return pair


def _no_languages(own: Sequence[SideFile], source: Path, train: SideFile | None) -> InputError:
    stems = {file.stem for file in own}
    pairs = {
        pair for stem in stems for pair in pairs_of(one.language for one in own if one.stem == stem)
    }
    if train:
        pairs = {pair for pair in pairs if train.language in pair}
    if pairs:
        return missing_languages(pairs, str(source))
    names = ", ".join(file.path.name for file in own[:_MOST_FILES_SHOWN])
    found = " and ".join(sorted({file.language for file in own}))
    if not own:
        message = f"{source} has no train split: expected train.de, train.en and so on"
    elif len({file.language for file in own}) > 1:
        message = (
            f"{source} has train files in {found}, but no two that are sides of the same split "
            f"({names}): expected names that differ only in the language, as train.de and train.en"
        )
    else:
        message = (
            f"{source} has a train split in one language only, {found} ({names}): expected its "
            "translation in a file next to it with a name that differs only in the language, as "
            "train.de and train.en; or both in the columns of train.tsv"
        )
    return not_found(_folder(source), message)


def choose_files(
    files: Sequence[SideFile], languages: LanguagePair, source: Path, train: SideFile | None
) -> dict[Split, tuple[Path, Path]]:
    """Return the two files of every split.

    Args:
        files: sides in the folder.
        languages: source and target language.
        source: path given by the user, for messages.
        train: one side of the train split; None to search for it.

    Raises:
        InputError: a split is missing or ambiguous.
    """
    chosen: dict[Split, tuple[Path, Path]] = {}
    for split in SPLITS:
        of_split = [file for file in files if file.split == split and file.language in languages]
        found = _candidates(_both_sides(of_split, languages), split, train)
        if not found:
            raise _no_split(of_split, split, languages, source)
        first, second = _one(found, split, source)
        chosen[split] = first.path, second.path
        if split == "train":
            # The other splits should have the NAME and MIDDLE of this one.
            train = first
    return chosen


_Sides = tuple[SideFile, SideFile]


def _both_sides(files: Iterable[SideFile], languages: LanguagePair) -> list[_Sides]:
    by_stem: dict[tuple[str, str, str], dict[str, SideFile]] = {}
    for file in files:
        by_stem.setdefault(file.stem, {})[file.language] = file
    return [
        (sides[languages[0]], sides[languages[1]]) for sides in by_stem.values() if len(sides) == 2
    ]


def _candidates(every: list[_Sides], split: Split, train: SideFile | None) -> list[_Sides]:
    found: list[_Sides] = []
    for tier in _NAMES[split]:
        found = [sides for sides in every if sides[0].word in tier]
        if found:
            break
    if train is None:
        return found
    if split == "train":
        return [sides for sides in found if sides[0].stem == train.stem]
    same_name = [sides for sides in found if sides[0].name == train.name] or found
    return [sides for sides in same_name if sides[0].middle == train.middle] or same_name


def _one(found: list[_Sides], split: Split, source: Path) -> _Sides:
    plain = [sides for sides in found if (sides[0].name, sides[0].middle) == ("", "")]
    if len(plain) == 1:
        return plain[0]
    if len(found) > 1:
        names = ", ".join(file.path.name for file, _ in found)
        fix = "give the path of one" if split == "train" else "keep only one of them"
        raise InputError(
            f"{source} has several {split} splits in {found[0][0].language} ({names}): {fix}"
        )
    return found[0]


def _no_split(
    files: Sequence[SideFile], split: Split, languages: LanguagePair, source: Path
) -> InputError:
    for language in languages:
        if not any(file.language == language for file in files):
            names = ", ".join(f"{word}.{language}" for tier in _NAMES[split] for word in tier)
            return not_found(
                _folder(source),
                f"{source} has no {split} split in {language}: expected one of {names}, next to "
                "the others",
            )
    names = ", ".join(file.path.name for file in files[:_MOST_FILES_SHOWN])
    return not_found(
        _folder(source),
        f"{source} has no two files that are sides of the same {split} split ({names}): expected "
        f"names that differ only in the language, as {split}.{languages[0]} and "
        f"{split}.{languages[1]}",
    )


def _folder(source: Path) -> Path:
    return source if source.is_dir() else source.parent
