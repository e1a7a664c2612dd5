"""Texts as bytes, in three splits: enwik8, text8, any file, or an embedded corpus.

`load_bytes` reads

- one file, such as the official `enwik8` or `text8`: its first 90 % are train, the next 5 % valid
  and the rest test, which for 100,000,000 bytes is the split of the literature.
- a folder with `train.txt`, `valid.txt` and `test.txt`, byte for byte. If it also has
  `train.txt.raw` and so on from Transformer-XL's preparation, these are read instead: the `.txt`
  files of that preparation hold the bytes as numbers.
- a folder with a file `enwik8` or `text8`.
- the name of an embedded corpus; each document, in UTF-8, ends with a newline.

The vocabulary always has all 256 bytes, so that it is independent of the text and no byte is
unknown.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS, Corpus, Split
from powernorm_lab.data.embedded import EMBEDDED, embedded_corpus
from powernorm_lab.data.readers import USER_LICENSE

VOCABULARY_SIZE: Final = 256
OFFICIAL_SIZES: Final[Mapping[str, int]] = {"enwik8": 100_000_000, "text8": 100_000_000}
"""Numbers of bytes of files with these names."""
MINIMUM: Final = 1000
"""Minimal number of bytes of a file to split."""
_PACKED: Final = (".zip", ".gz", ".xz", ".bz2", ".7z", ".zst")
# An unambiguous pattern: otherwise backtracking over damaged files of digits would take forever.
_NUMBERS: Final = re.compile(rb"(?:\d{1,3}[ \n]+)+\d{0,3}")
_LOOKED_AT: Final = 200


@dataclass(frozen=True, eq=False)
class EncodedBytes:
    """A text as bytes."""

    name: str
    source: str
    license: str
    splits: Mapping[Split, Tensor]
    """uint8, (number of bytes,)."""

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the splits."""
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(f"{split} {self.splits[split].numel()} ".encode())
            digest.update(self.splits[split].numpy().data)
        return digest.hexdigest()

    def start_of(self, split: Split) -> int:
        """Return the position of a split in the concatenation of all splits."""
        before = SPLITS[: SPLITS.index(split)]
        return sum(self.splits[earlier].numel() for earlier in before)


def load_bytes(source: str | None) -> EncodedBytes:
    """Return the text that a configuration names.

    Args:
        source: name of an embedded corpus, or path of the user's file or folder (use `./rt` for a
            file with the name of a corpus); None is the State of the Union addresses.

    Raises:
        InputError: as `read_bytes`.
    """
    if source is None or source in EMBEDDED:
        return _of_corpus(embedded_corpus() if source is None else embedded_corpus(source))
    return read_bytes(Path(source))


def read_bytes(path: Path) -> EncodedBytes:
    """Read the user's text.

    Raises:
        InputError: the file cannot be read, is too short, incomplete or packed, or holds numbers;
            the message names the file and the expected contents.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a file such as enwik8, a folder with train.txt, "
            f"valid.txt and test.txt, or the name of an embedded corpus ({', '.join(EMBEDDED)})"
        )
    return _read_whole(path)


def _of_corpus(corpus: Corpus) -> EncodedBytes:
    splits = {
        split: _tensor("".join(f"{document}\n" for document in corpus.documents[split]).encode())
        for split in SPLITS
    }
    return EncodedBytes(corpus.name, corpus.source, corpus.license, splits)


def _read_folder(folder: Path) -> EncodedBytes:
    files = {split: _split_file(folder, split) for split in SPLITS}
    found = {split: path for split, path in files.items() if path is not None}
    if not found:
        for name in OFFICIAL_SIZES:
            if (folder / name).is_file():
                return _read_whole(folder / name)
        raise InputError(
            f"{folder} holds no text of bytes: expected train.txt, valid.txt and test.txt, or a "
            "file enwik8 or text8"
        )
    for split in SPLITS:
        if split not in found:
            names = " and ".join(path.name for path in found.values())
            raise InputError(f"{folder} has {names} but no {split}.txt: put it next to the others")
    splits = {split: _read_split(path) for split, path in found.items()}
    return EncodedBytes(folder.resolve().name, str(folder), USER_LICENSE, splits)


def _split_file(folder: Path, split: Split) -> Path | None:
    for name in (f"{split}.txt.raw", f"{split}.txt"):
        if (folder / name).exists():
            return folder / name
    return None


def _read_split(path: Path) -> Tensor:
    content = _read(path)
    if not content:
        raise InputError(f"{path} is empty: expected text")
    # Only files of Transformer-XL's preparation begin with so many numbers.
    if _NUMBERS.fullmatch(content[:_LOOKED_AT]):
        raise InputError(
            f"{path}, line 1: bytes written as numbers ({content[:12].decode()!r}); put the "
            f"{path.name}.raw of the same preparation next to it, or give the text itself"
        )
    return _tensor(content)


def _read_whole(path: Path) -> EncodedBytes:
    if path.suffix in _PACKED:
        raise InputError(f"{path} is packed: unpack it and give the file in it")
    content = _read(path)
    expected = OFFICIAL_SIZES.get(path.name)
    if expected is not None and len(content) != expected:
        raise InputError(
            f"{path} has {len(content):,} bytes and should have {expected:,}: fetch it again, or "
            "rename the file if this is intended"
        )
    if len(content) < MINIMUM:
        raise InputError(
            f"{path} has {len(content)} bytes: at least {MINIMUM} are needed to set some aside "
            "for validation and test"
        )
    whole = _tensor(content)
    first, second = len(content) * 90 // 100, len(content) * 95 // 100
    splits: dict[Split, Tensor] = {
        "train": whole[:first],
        "valid": whole[first:second],
        "test": whole[second:],
    }
    return EncodedBytes(path.stem, str(path), USER_LICENSE, splits)


def _read(path: Path) -> bytearray:
    try:
        # A bytearray, because a tensor needs writable memory.
        content = bytearray(path.stat().st_size)
        with path.open("rb", buffering=0) as file:
            view, size = memoryview(content), 0
            while read := file.readinto(view[size:]):
                size += read
        view.release()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): expected a file") from error
    del content[size:]
    return content


def _tensor(content: bytes | bytearray) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(
        bytearray(content) if isinstance(content, bytes) else content, dtype=torch.uint8
    )
