"""Texts as bytes, in three splits: enwik8, text8, any file, or an embedded corpus.

`load_bytes` takes

- one file, such as the official `enwik8` or `text8`: its first 90 % are train, the next 5 % valid
  and the rest test, which for 100,000,000 bytes is the split of the literature.
- a folder with `train.txt`, `valid.txt` and `test.txt`, taken as they are, byte for byte. Where
  Transformer-XL's preparation has left `train.txt.raw` and so on beside them, these are read: its
  `.txt` files hold the bytes as numbers.
- a folder with a file `enwik8` or `text8`.
- the name of an embedded corpus; its documents, in UTF-8, each end with a newline.

A model of bytes has all 256 of them, whatever occurs: nothing can be unknown, and the vocabulary
depends on no text.
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
"""Bytes of the files that are called so."""
MINIMUM: Final = 1000
"""Bytes of a file that is split."""
_PACKED: Final = (".zip", ".gz", ".xz", ".bz2", ".7z", ".zst")
# One way only to part what it matches: else damaged files of digits would take for ever.
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
        """Return where a split begins if all of them are laid one after the other."""
        before = SPLITS[: SPLITS.index(split)]
        return sum(self.splits[earlier].numel() for earlier in before)


def load_bytes(source: str | None) -> EncodedBytes:
    """Return the text that a configuration names.

    Args:
        source: name of an embedded corpus, or the path of the user's file or folder (write `./rt`
            for a file that is called like a corpus); None is the State of the Union addresses.

    Raises:
        InputError: as `read_bytes`.
    """
    if source is None or source in EMBEDDED:
        return _of_corpus(embedded_corpus() if source is None else embedded_corpus(source))
    return read_bytes(Path(source))


def read_bytes(path: Path) -> EncodedBytes:
    """Read the user's text.

    Raises:
        InputError: the path cannot be read, is too short or incomplete, packed, or holds numbers;
            the message names the file and what was expected.
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
            raise InputError(f"{folder} has {names} but no {split}.txt: put it beside the others")
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
    # Only what Transformer-XL's preparation writes looks so for a whole line.
    if _NUMBERS.fullmatch(content[:_LOOKED_AT]):
        raise InputError(
            f"{path}, line 1: bytes written as numbers ({content[:12].decode()!r}); put the "
            f"{path.name}.raw of the same preparation beside it, or give the text itself"
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
            "give the file another name if it is meant to be so"
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
        # A tensor wants memory that it may write to.
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
