"""Treebanks in three splits: those of `powernorm-data`, and the user's files.

The files are CoNLL-U or CoNLL-X.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from powernorm.errors import InputError
from powernorm.lab.data.conllu import Sentence, parse_conllu
from powernorm.lab.data.corpus import SPLITS, Split
from powernorm.lab.data.readers import USER_LICENSE, read_text
from powernorm.lab.data.sets.catalog import data_set
from powernorm.lab.data.sets.embedded_files import embedded_texts

PERIOD: Final = 10
VALID_REMAINDER: Final = 8
TEST_REMAINDER: Final = 9
DEFAULT: Final = "petrogold"
_OFFICIAL: Final = re.compile(
    r"^(?:(?P<name>.+)[.-])?(?P<split>train|valid|dev|test)\.(?:conllu|conllx|conll)$"
)
_EXPECTED: Final = "*.train.conllu, *.dev.conllu and *.test.conllu (or .conllx, .conll)"
_FILE_SPLITS: Final[Mapping[str, Split]] = MappingProxyType(
    {"train": "train", "valid": "valid", "dev": "valid", "test": "test"}
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Treebank:
    """Annotated sentences in three splits."""

    name: str
    source: str
    license: str
    sentences: Mapping[Split, tuple[Sentence, ...]]


@dataclass(frozen=True, slots=True)
class _EmbeddedTreebank:
    source: str
    license: str
    """Files, one after the other."""
    group: Callable[[list[Sentence]], list[list[Sentence]]]
    """Divides the sentences into groups, none of which is in two splits."""


def load_treebank(source: str | None) -> Treebank:
    """Return the treebank that a configuration names.

    - `petrogold`: Portuguese (PetroGold), split by document
    - `turkish`: Turkish, web and Wikipedia, split by sentence
    - a folder with `….train.conllu`, `….dev.conllu` and `….test.conllu` (or `-` for the dot, as
      Universal Dependencies names its files, or `valid`), or the path of the first of them; the
      files may end in `.conllx` or `.conll`, too
    - any other such file, split by sentence

    Of what is split here, of every ten groups the ninth is valid and the tenth test.

    Args:
        source: one of these; None is `petrogold`. (Write `./turkish` for a path that is called
            like a treebank.)

    Raises:
        InputError: there is no such treebank, or a file of it is damaged.
    """
    name = DEFAULT if source is None else source
    return _embedded(name) if name in _TREEBANKS else _read(Path(name))


def _embedded(name: str) -> Treebank:
    entry = _TREEBANKS[name]
    about = data_set(name)
    sentences = [
        sentence
        for text, file in zip(embedded_texts(about), about.files, strict=True)
        for sentence in parse_conllu(text, file.name)
    ]
    parts = _split(entry.group(sentences))
    return Treebank(name, entry.source, entry.license, parts)


def _by_document(sentences: list[Sentence]) -> list[list[Sentence]]:
    """PetroGold numbers the sentences of a document: `247-20140910-MONOGRAFIA_0-12`."""
    documents = groupby(sentences, key=lambda item: item.comments["sent_id"].rpartition("-")[0])
    return [list(document) for _, document in documents]


def _one_by_one(sentences: list[Sentence]) -> list[list[Sentence]]:
    return [[sentence] for sentence in sentences]


def _split(groups: Sequence[Sequence[_T]]) -> dict[Split, tuple[_T, ...]]:
    """Divide groups; of every ten the ninth is valid and the tenth test."""
    parts: dict[Split, list[_T]] = {split: [] for split in SPLITS}
    remainders: dict[int, Split] = {VALID_REMAINDER: "valid", TEST_REMAINDER: "test"}
    for index, group in enumerate(groups):
        parts[remainders.get(index % PERIOD, "train")] += group
    return {split: tuple(part) for split, part in parts.items()}


def _read(path: Path) -> Treebank:
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with {_EXPECTED}, one CoNLL-U or CoNLL-X file, "
            f"or the name of an embedded treebank ({', '.join(TREEBANKS)})"
        )
    match = _OFFICIAL.match(path.name)
    if match and match["split"] == "train":
        return _read_official(path.parent, match["name"] or "")
    sentences = parse_conllu(read_text(path), str(path))
    if len(sentences) < PERIOD:
        raise InputError(
            f"{path} has {len(sentences)} sentences: at least {PERIOD} are needed to set some "
            "aside for validation and test"
        )
    return Treebank(path.stem, str(path), USER_LICENSE, _split(_one_by_one(sentences)))


def _read_folder(folder: Path) -> Treebank:
    matches = (_OFFICIAL.match(path.name) for path in folder.iterdir())
    names = sorted({match["name"] or "" for match in matches if match})
    if not names:
        raise InputError(f"{folder} holds no treebank: expected {_EXPECTED}")
    if len(names) > 1:
        raise InputError(
            f"{folder} holds several treebanks ({', '.join(name or 'train' for name in names)}): "
            "give the path of the train file of one"
        )
    return _read_official(folder, names[0])


def _read_official(folder: Path, name: str) -> Treebank:
    found: dict[Split, list[Path]] = {split: [] for split in SPLITS}
    for path in sorted(folder.iterdir()):
        match = _OFFICIAL.match(path.name)
        if match and (match["name"] or "") == name:
            found[_FILE_SPLITS[match["split"]]].append(path)
    for split, paths in found.items():
        if len(paths) != 1:
            held = " and ".join(path.name for path in paths) or "none"
            raise InputError(
                f"{folder} must hold one {split} split of {name or 'the treebank'}, found {held}: "
                f"expected {_EXPECTED}"
            )
    sentences = {
        split: tuple(parse_conllu(read_text(path), str(path))) for split, (path,) in found.items()
    }
    return Treebank(name or folder.resolve().name, str(folder), USER_LICENSE, sentences)


_TREEBANKS: Final[Mapping[str, _EmbeddedTreebank]] = MappingProxyType(
    {
        "petrogold": _EmbeddedTreebank(
            "PetroGold, theses on petroleum in Portuguese, PyPI dante-corpora 2.0.5, split by "
            "document",
            "CC BY-SA 4.0",
            _by_document,
        ),
        "turkish": _EmbeddedTreebank(
            "Turkish web pages and Wikipedia, PyPI turkish-treebanks 1.0.0",
            "Apache 2.0",
            _one_by_one,
        ),
    }
)

TREEBANKS: Final = tuple(_TREEBANKS)
"""Names of the embedded treebanks."""
