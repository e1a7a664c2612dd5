"""Sentences with named entities in three splits: embedded, fetched, or the user's files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, TEN, Split, split_by_position
from powernorm_lab.data.fetching import fetched
from powernorm_lab.data.readers import USER_LICENSE, read_text
from powernorm_lab.data.sets.catalog import data_set
from powernorm_lab.data.sets.embedded_files import embedded_texts
from powernorm_lab.data.split_files import SplitFiles, split_sentences
from powernorm_lab.tasks.ner.columns import TaggedSentence, parse_columns

DEFAULT: Final = "hironsan"
FETCHED: Final = ("conll2003", "msra")
"""Data sets that are fetched on request."""
NAMES: Final = (DEFAULT, *FETCHED)
_FILES: Final = SplitFiles(
    re.compile(
        r"(?:(?P<name>.+)[._-])?(?P<split>train|valid|dev|test[ab]?)(?:\.(?:char|word|all|ner))?"
        r"(?:\.(?:txt|char|bmes|bmeso|bioes|iob|iob1|iob2|bio|conll|tsv|ner))?"
    ),
    "eng.train, eng.testa and eng.testb, or train, dev (valid) and test with an ending such as "
    ".txt, .conll or .char.bmes",
    "data sets",
    optional=("valid",),
)
"""Names such as `eng.testa`, `train.char.bmes`, `msra_train.txt` and `dev.conll`."""


@dataclass(frozen=True, slots=True)
class EntityCorpus:
    """Sentences with entities in three splits."""

    name: str
    source: str
    license: str
    sentences: Mapping[Split, tuple[TaggedSentence, ...]]

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of entities of all splits, sorted."""
        found = {
            span.kind for part in self.sentences.values() for item in part for span in item.spans
        }
        return sorted(found)


def load_entities(source: str | None) -> EntityCorpus:
    """Return the sentences that a configuration names.

    - `hironsan`: 500 Japanese sentences of `powernorm-data`
    - `conll2003`, `msra`: English and Chinese news, after they were fetched
    - a folder with the official files, or the path of its train file. Without a valid split, every
      tenth sentence of the train split is used for validation.
    - any other file; of every ten sentences the ninth is valid and the tenth test

    Args:
        source: one of these; None is `hironsan`. (Use `./msra` for a path with the name of a data
            set.)

    Raises:
        InputError: there is no such file, a file is damaged, or the data set was not fetched.
    """
    name = DEFAULT if source is None else source
    if name == DEFAULT:
        return _embedded()
    if name in FETCHED:
        about = data_set(name)
        return _read_folder(fetched(name), name, about.source, about.license)
    return _read(Path(name))


def _embedded() -> EntityCorpus:
    about = data_set(DEFAULT)
    (text,), (file,) = embedded_texts(about), about.files
    # Two of its entities begin with I.
    sentences = parse_columns(text, file.name, "iob")
    return EntityCorpus(DEFAULT, about.source, about.license, split_by_position(sentences, TEN))


def _parse(path: Path) -> list[TaggedSentence]:
    return parse_columns(read_text(path), str(path))


def _read(path: Path) -> EntityCorpus:
    if path.is_dir():
        return _read_folder(path, None, str(path), USER_LICENSE)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with {_FILES.expected}, one file with a word "
            f"and its tag on each line, or the name of a data set ({', '.join(NAMES)})"
        )
    prefix = _FILES.train_name(path)
    if prefix is not None and _others(path.parent, prefix):
        name = prefix or path.parent.resolve().name
        return _read_official(path.parent, prefix, name, str(path.parent), USER_LICENSE)
    return EntityCorpus(path.stem, str(path), USER_LICENSE, split_sentences(_parse(path), path))


def _others(folder: Path, name: str) -> bool:
    """Return whether the folder of a train file has other splits."""
    matches = (_FILES.pattern.fullmatch(path.name) for path in folder.iterdir())
    return any(m and (m["name"] or "") == name and m["split"] != "train" for m in matches)


def _read_folder(folder: Path, name: str | None, source: str, license: str) -> EntityCorpus:
    prefix = _FILES.only_name(_FILES.names(folder), folder)
    if prefix is None:
        raise InputError(f"{folder} holds no sentences with entities: expected {_FILES.expected}")
    return _read_official(folder, prefix, name or prefix or folder.resolve().name, source, license)


def _read_official(folder: Path, prefix: str, name: str, source: str, license: str) -> EntityCorpus:
    parts = {split: tuple(_parse(path)) for split, path in _FILES.of(folder, prefix).items()}
    if "valid" not in parts:
        tenth = TEN.length - 1
        train = parts["train"]
        parts["valid"] = train[tenth :: TEN.length]
        parts["train"] = tuple(
            sentence for index, sentence in enumerate(train) if index % TEN.length != tenth
        )
        source = f"{source}, every tenth sentence of the train split set aside as valid"
    for split in SPLITS:
        if not parts[split]:
            raise InputError(f"the {split} split of {folder} has no sentences: give some")
    return EntityCorpus(name, source, license, {split: parts[split] for split in SPLITS})
