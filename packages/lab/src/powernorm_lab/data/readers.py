"""Readers of the user's text: official language-model files, or plain text.

`read_corpus` reads

- a folder with official files, `NAME.train.txt`, `NAME.valid.txt`, `NAME.test.txt` (Penn Treebank:
  `ptb.train.txt`), the same ending in `.tokens` or `.raw` (WikiText: `wiki.train.tokens`), or just
  `train.txt`, `valid.txt`, `test.txt`; or the path of such a train file with the other two in the
  same folder. Every line, including empty ones, is a document whose end counts as a word.
- a folder of other `.txt` files: each file is a document, in the order of the names.
- one plain text file: each paragraph (blocks between empty lines) is a document.

Plain documents are split by `split_by_position`. If there are fewer than 20 documents, smaller
units are used: paragraphs instead of files, lines instead of paragraphs.
"""

import re
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.data.corpus import TWENTY, Corpus, split_by_position
from powernorm_lab.data.embedded import EMBEDDED, embedded_corpus
from powernorm_lab.data.files import USER_LICENSE, SplitFiles, read_text

_FILES: Final = SplitFiles(
    re.compile(r"(?:(?P<name>.+)\.)?(?P<split>train|valid|test)\.(?:txt|tokens|raw)"),
    "train.txt, valid.txt and test.txt, with a name before them or .tokens or .raw at their end",
    "corpora",
)
CHARACTER_NAME: Final = "char"
"""Part of names such as `ptb.char.train.txt`, which Mikolov's archive has beside the word-level
files of the same text."""


def load_corpus(source: str | None) -> Corpus:
    """Return the text that a configuration names.

    Args:
        source: name of an embedded corpus, or path of the user's text (use `./rt` for a folder with
            the name of a corpus); None is the State of the Union addresses.

    Raises:
        InputError: as `read_corpus`.
    """
    if source is None:
        return embedded_corpus()
    return embedded_corpus(source) if source in EMBEDDED else read_corpus(Path(source))


def read_corpus(path: Path) -> Corpus:
    """Read the user's text.

    Raises:
        InputError: the path, one of its files or the text in it cannot be used; the message names
            the file, the expected contents and, for text that is not UTF-8, the line.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a folder with *.train.txt, *.valid.txt and *.test.txt "
            "files, a folder of .txt files, one text file, or the name of an embedded corpus "
            f"({', '.join(EMBEDDED)})"
        )
    name = _FILES.train_name(path)
    if name is not None:
        return _read_official(path.parent, name)
    return _read_plain(path.stem, str(path), [read_text(path)])


def _read_folder(folder: Path) -> Corpus:
    names = _FILES.names(folder)
    words = {name for name in names if name.split(".")[-1] != CHARACTER_NAME}
    name = _FILES.only_name(words or names, folder)
    if name is not None:
        return _read_official(folder, name)
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".txt")
    if not paths:
        raise InputError(
            f"{folder} holds no text: expected *.train.txt, *.valid.txt and *.test.txt, or .txt "
            "files"
        )
    return _read_plain(folder.resolve().name, str(folder), [read_text(path) for path in paths])


def _read_official(folder: Path, name: str) -> Corpus:
    # The end of every line counts as a word.
    documents = {
        split: tuple(read_text(path).removesuffix("\n").split("\n"))
        for split, path in _FILES.of(folder, name).items()
    }
    return Corpus(name or folder.resolve().name, str(folder), USER_LICENSE, documents, True)


def _read_plain(name: str, source: str, texts: list[str]) -> Corpus:
    units = [text for text in texts if text.strip()]
    for pattern in (r"\n\s*\n", r"\n"):
        if len(units) >= TWENTY.length:
            break
        parts = (part.strip() for text in texts for part in re.split(pattern, text))
        units = [part for part in parts if part]
    if len(units) < TWENTY.length:
        raise InputError(
            f"{source} has {len(units)} lines of text: at least {TWENTY.length} are needed to set "
            "some aside for validation and test"
        )
    return Corpus(name, source, USER_LICENSE, split_by_position(units), False)
