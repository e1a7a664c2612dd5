"""Sentences with named entities in three splits: embedded, fetched, or the user's files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.data.corpus import SPLITS, Split
from powernorm.lab.data.fetching import fetched
from powernorm.lab.data.readers import USER_LICENSE, read_text
from powernorm.lab.data.sets.catalog import data_set
from powernorm.lab.data.sets.embedded_files import embedded_texts
from powernorm.lab.data.treebanks import PERIOD, TEST_REMAINDER, VALID_REMAINDER
from powernorm.lab.tasks.ner.columns import TaggedSentence, parse_columns

DEFAULT: Final = "hironsan"
FETCHED: Final = ("conll2003", "msra")
"""Data sets that are fetched on request."""
NAMES: Final = (DEFAULT, *FETCHED)
_OFFICIAL: Final = re.compile(
    r"(?:(?P<name>.+)[._-])?(?P<split>train|valid|dev|test[ab]?)"
    r"(?:\.(?:char|word|all|ner))?(?:\.(?:txt|char|bmes|bmeso|bioes|iob|iob1|iob2|bio|conll|tsv|ner))?"
)
"""`eng.testa`, `train.char.bmes`, `msra_train.txt`, `dev.conll`, …"""
_EXPECTED: Final = (
    "eng.train, eng.testa and eng.testb, or train, dev (valid) and test with an ending such as "
    ".txt, .conll or .char.bmes"
)


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
    - `conll2003`, `msra`: English and Chinese news, once they were fetched
    - a folder with the official files, or the path of the train file among them. Without a valid
      split every tenth sentence of the train split is that.
    - any other file; of every ten sentences the ninth is valid and the tenth test

    Args:
        source: one of these; None is `hironsan`. (Write `./msra` for a path that is called like a
            data set.)

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
    return EntityCorpus(DEFAULT, about.source, about.license, _split(sentences))


def _split(sentences: Sequence[TaggedSentence]) -> dict[Split, tuple[TaggedSentence, ...]]:
    parts: dict[Split, list[TaggedSentence]] = {split: [] for split in SPLITS}
    remainders: dict[int, Split] = {VALID_REMAINDER: "valid", TEST_REMAINDER: "test"}
    for index, sentence in enumerate(sentences):
        parts[remainders.get(index % PERIOD, "train")].append(sentence)
    return {split: tuple(part) for split, part in parts.items()}


def _read(path: Path) -> EntityCorpus:
    if path.is_dir():
        return _read_folder(path, None, str(path), USER_LICENSE)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with {_EXPECTED}, one file with a word and its "
            f"tag a line, or the name of a data set ({', '.join(NAMES)})"
        )
    match = _OFFICIAL.fullmatch(path.name)
    if match and match["split"] == "train" and _others(path.parent, match["name"]):
        folder, prefix = path.parent, match["name"] or ""
        name = prefix or folder.resolve().name
        return _read_official(folder, prefix, name, str(folder), USER_LICENSE)
    sentences = parse_columns(read_text(path), str(path))
    if len(sentences) < PERIOD:
        raise InputError(
            f"{path} has {len(sentences)} sentences: at least {PERIOD} are needed to set some "
            "aside for validation and test"
        )
    return EntityCorpus(path.stem, str(path), USER_LICENSE, _split(sentences))


def _others(folder: Path, name: str | None) -> bool:
    """Return whether other splits stand beside the train file."""
    matches = (_OFFICIAL.fullmatch(path.name) for path in folder.iterdir())
    return any(m and m["name"] == name and m["split"] != "train" for m in matches)


def _read_folder(folder: Path, name: str | None, source: str, license: str) -> EntityCorpus:
    matches = (_OFFICIAL.fullmatch(path.name) for path in folder.iterdir())
    names = sorted({match["name"] or "" for match in matches if match})
    if not names:
        raise InputError(f"{folder} holds no sentences with entities: expected {_EXPECTED}")
    if len(names) > 1:
        raise InputError(
            f"{folder} holds several data sets ({', '.join(item or 'train' for item in names)}): "
            "give the path of the train file of one"
        )
    return _read_official(
        folder, names[0], name or names[0] or folder.resolve().name, source, license
    )


def _read_official(folder: Path, prefix: str, name: str, source: str, license: str) -> EntityCorpus:
    paths = _official_paths(folder, prefix)
    parts = {
        split: tuple(parse_columns(read_text(path), str(path))) for split, path in paths.items()
    }
    if "valid" not in parts:
        train = parts["train"]
        parts["valid"] = train[PERIOD - 1 :: PERIOD]
        parts["train"] = tuple(
            sentence for index, sentence in enumerate(train) if index % PERIOD != PERIOD - 1
        )
        source = f"{source}, every tenth sentence of the train split set aside as valid"
    for split in SPLITS:
        if not parts[split]:
            raise InputError(f"the {split} split of {folder} has no sentences: give some")
    return EntityCorpus(name, source, license, {split: parts[split] for split in SPLITS})


def _official_paths(folder: Path, prefix: str) -> dict[Split, Path]:
    """Return the file of each split; that of valid may be missing."""
    found: dict[Split, list[Path]] = {split: [] for split in SPLITS}
    for path in sorted(folder.iterdir()):
        match = _OFFICIAL.fullmatch(path.name)
        if match and (match["name"] or "") == prefix:
            found[_SPLITS[match["split"]]].append(path)
    for split, paths in found.items():
        if len(paths) > 1 or (not paths and split != "valid"):
            held = " and ".join(path.name for path in paths) or "none"
            raise InputError(
                f"{folder} must hold one {split} split of {prefix or 'the data set'}, found "
                f"{held}: expected {_EXPECTED}"
            )
    return {split: paths[0] for split, paths in found.items() if paths}


_SPLITS: Final[Mapping[str, Split]] = MappingProxyType(
    {
        "train": "train",
        "valid": "valid",
        "dev": "valid",
        "testa": "valid",
        "testb": "test",
        "test": "test",
    }
)
