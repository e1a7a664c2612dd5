"""Treebanks in three splits, from `powernorm-data` or the user's CoNLL-U or CoNLL-X files."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.conllu import Sentence, parse_conllu
from powernorm_lab.data.corpus import TEN, Split, split_by_position
from powernorm_lab.data.readers import USER_LICENSE, read_text
from powernorm_lab.data.sets.catalog import data_set
from powernorm_lab.data.sets.embedded_files import embedded_texts
from powernorm_lab.data.split_files import SplitFiles, split_sentences

DEFAULT: Final = "petrogold"
_FILES: Final = SplitFiles(
    re.compile(r"(?:(?P<name>.+)[.-])?(?P<split>train|valid|dev|test)\.(?:conllu|conllx|conll)"),
    "*.train.conllu, *.dev.conllu and *.test.conllu (or .conllx, .conll)",
    "treebanks",
)


@dataclass(frozen=True, slots=True)
class Treebank:
    """Annotated sentences in three splits."""

    name: str
    source: str
    license: str
    sentences: Mapping[Split, tuple[Sentence, ...]]


def load_treebank(source: str | None) -> Treebank:
    """Return the treebank that a configuration names.

    - `petrogold`: Portuguese (PetroGold), split by document
    - `turkish`: Turkish, web and Wikipedia, split by sentence
    - a folder with `….train.conllu`, `….dev.conllu` and `….test.conllu` (`-` in place of the dot as
      in Universal Dependencies, `valid` in place of `dev`, or `.conllx` or `.conll` as the ending),
      or the path of the train file
    - any other such file, split by sentence

    Where no splits are given, of every ten groups the ninth is valid and the tenth test.

    Args:
        source: one of these; None is `petrogold`. (Use `./turkish` for a path with the name of a
            treebank.)

    Raises:
        InputError: there is no such treebank, or one of its files is damaged.
    """
    name = DEFAULT if source is None else source
    return _embedded(name) if name in _TREEBANKS else _read(Path(name))


def _embedded(name: str) -> Treebank:
    about = data_set(name)
    sentences = [
        sentence
        for text, file in zip(embedded_texts(about), about.files, strict=True)
        for sentence in parse_conllu(text, file.name)
    ]
    parts = split_by_position(_TREEBANKS[name](sentences), TEN)
    trees = {split: tuple(chain.from_iterable(groups)) for split, groups in parts.items()}
    return Treebank(name, about.origin, about.license, trees)


def _by_document(sentences: list[Sentence]) -> list[list[Sentence]]:
    """Group sentences by document; PetroGold's ids are like `247-20140910-MONOGRAFIA_0-12`."""
    documents = groupby(sentences, key=lambda item: item.comments["sent_id"].rpartition("-")[0])
    return [list(document) for _, document in documents]


def _one_by_one(sentences: list[Sentence]) -> list[list[Sentence]]:
    return [[sentence] for sentence in sentences]


def _parse(path: Path) -> list[Sentence]:
    return parse_conllu(read_text(path), str(path))


def _read(path: Path) -> Treebank:
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with {_FILES.expected}, one CoNLL-U or CoNLL-X "
            f"file, or the name of an embedded treebank ({', '.join(TREEBANKS)})"
        )
    if path.is_dir():
        folder, name = path, _FILES.only_name(_FILES.names(path), path)
        if name is None:
            raise InputError(f"{folder} holds no treebank: expected {_FILES.expected}")
    else:
        folder, name = path.parent, _FILES.train_name(path)
    if name is None:
        return Treebank(path.stem, str(path), USER_LICENSE, split_sentences(_parse(path), path))
    sentences = {split: tuple(_parse(file)) for split, file in _FILES.of(folder, name).items()}
    return Treebank(name or folder.resolve().name, str(folder), USER_LICENSE, sentences)


_TREEBANKS: Final[Mapping[str, Callable[[list[Sentence]], list[list[Sentence]]]]] = (
    MappingProxyType({"petrogold": _by_document, "turkish": _one_by_one})
)
"""Functions that divide sentences into groups; a group is not divided between splits."""

TREEBANKS: Final = tuple(_TREEBANKS)
"""Names of the embedded treebanks."""
