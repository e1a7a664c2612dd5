"""Sentence pairs on disk: written a portion at a time, mapped into memory afterwards.

A store is a folder of the cache. It comes into being by renaming a finished folder, and a manifest
names the size and the checksum of each file, and its own, so that what is damaged is never read.
Of the valid and test splits the text is there too: what a run is scored with is what it was encoded
from, whatever has become of the user's files.
"""

import json
import logging
import os
import shutil
import tempfile
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Literal, TextIO

import torch

from powernorm.errors import InputError
from powernorm.json_reading import parse_json, read_json_object
from powernorm.lab.data.cache import cache_folder
from powernorm.lab.data.corpus import EvaluatedSplit, Split
from powernorm.lab.data.lines import TextPair
from powernorm.lab.data.subwords import END_ID
from powernorm.lab.tasks.translation.token_lists import EncodedPairSplit, TokenLists

LOGGER = logging.getLogger(__name__)

Side = Literal["source", "target"]
SIDES: Final[tuple[Side, ...]] = ("source", "target")
MANIFEST: Final = "manifest.json"
_SUFFIX: Final = ".pairs"
_ABANDONED_AFTER: Final = 24 * 60 * 60
"""Seconds without a change after which nobody is at work on a folder any more."""
_ITEM: Final = 4
_FIX: Final = "remove the folder, the pairs are encoded anew when they are needed"
_CHUNK: Final = 1 << 22


class PairWriter:
    """Writes the ids of a split's sentences to files, without keeping them.

    Args:
        folder: of the files.
        split: which they are named by.
    """

    def __init__(self, folder: Path, split: Split) -> None:
        self._files = ExitStack()
        self._ids: dict[Side, BinaryIO] = {}
        self._lengths: dict[Side, BinaryIO] = {}
        for side in SIDES:
            self._ids[side] = self._files.enter_context((folder / f"{split}.{side}.ids").open("wb"))
            path = folder / f"{split}.{side}.lengths"
            self._lengths[side] = self._files.enter_context(path.open("wb"))

    def __enter__(self) -> "PairWriter":
        for file in self._ids.values():
            array("i", [END_ID]).tofile(file)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def write(self, side: Side, sentences: Iterable[Sequence[int]]) -> None:
        """Append sentences, ids without end marks."""
        ids, lengths = array("i"), array("i")
        for sentence in sentences:
            ids.extend(sentence)
            ids.append(END_ID)
            lengths.append(len(sentence) + 1)
        ids.tofile(self._ids[side])
        lengths.tofile(self._lengths[side])


def read_split(folder: Path, split: Split) -> EncodedPairSplit:
    """Map the sentences of a split into memory."""
    return EncodedPairSplit(*(_read_side(folder, split, side) for side in SIDES))


def _read_side(folder: Path, split: Split, side: Side) -> TokenLists:
    flat, lengths = (
        torch.from_file(
            str(path), shared=False, size=path.stat().st_size // _ITEM, dtype=torch.int32
        )
        for path in (folder / f"{split}.{side}.ids", folder / f"{split}.{side}.lengths")
    )
    return TokenLists(flat, lengths)


def append_text(folder: Path, split: EvaluatedSplit, pairs: Iterable[TextPair]) -> None:
    """Keep the text of pairs, whatever characters it has."""
    with _text_path(folder, split).open("a") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in pairs)


def read_text(folder: Path, split: EvaluatedSplit) -> list[TextPair]:
    """Return what was kept."""
    with _text_path(folder, split).open() as file:
        return [(source, target) for source, target in _json_lines(file)]


def _json_lines(file: TextIO) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        yield parse_json(line, file.name, _FIX, line=number)


def _text_path(folder: Path, split: EvaluatedSplit) -> Path:
    return folder / f"{split}.text.jsonl"


class PairStore:
    """A finished folder of files.

    Args:
        folder: of the files.
        facts: that were recorded with them.
        is_temporary: whether the folder goes when the store does.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], *, is_temporary: bool = False) -> None:
        self.folder = folder
        self.facts = facts
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


def found_or_made(key: str, make: Callable[[Path], dict[str, Any]]) -> PairStore:
    """Return the store of the cache with a key; where there is none, make it.

    A cache that cannot be written is replaced by a temporary folder, with a warning.

    Args:
        key: of what determines the content.
        make: writes the files to an empty folder and returns facts, JSON values.

    Raises:
        InputError: no folder can be written.
    """
    folder = cache_folder() / f"{key}{_SUFFIX}"
    facts = _checked_facts(folder)
    if facts is not None:
        return PairStore(folder, facts)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _made(folder, make)
    except OSError as error:
        LOGGER.warning(
            "The cache %s cannot be written (%s): the encoded pairs are in a temporary folder, and "
            "every start encodes them anew; set POWERNORM_CACHE to a folder that can be written.",
            folder.parent,
            error.strerror,
        )
    try:
        return _made_temporarily(make)
    except OSError as error:
        raise InputError(
            f"the encoded sentence pairs cannot be written to {tempfile.gettempdir()} "
            f"({error.strerror}): free some space there, or set POWERNORM_CACHE to a folder that "
            "has it"
        ) from error


def _made(folder: Path, make: Callable[[Path], dict[str, Any]]) -> PairStore:
    """Make a store under another name in the same folder and then rename it."""
    _remove_abandoned(folder.parent)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True
    ) as outer:
        inner = Path(outer) / folder.name
        inner.mkdir()
        facts = _filled(inner, make)
        try:
            inner.rename(folder)
        except OSError:
            # A folder that has files is never replaced: another process was quicker.
            known = _checked_facts(folder)
            if known is None:
                raise
            facts = known
    return PairStore(folder, facts)


def _remove_abandoned(cache: Path) -> None:
    """Remove what preparations that were killed have left under their names for the time being."""
    latest = time.time() - _ABANDONED_AFTER
    for outer in cache.glob(f".*{_SUFFIX}.*"):
        # One that is at work may be removing its own at this moment.
        with suppress(OSError):
            if max(path.lstat().st_mtime for path in (outer, *outer.rglob("*"))) < latest:
                shutil.rmtree(outer, ignore_errors=True)


def _made_temporarily(make: Callable[[Path], dict[str, Any]]) -> PairStore:
    folder = Path(tempfile.mkdtemp(prefix="powernorm."))
    try:
        return PairStore(folder, _filled(folder, make), is_temporary=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _filled(folder: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    facts = make(folder)
    files = {path.name: list(_measured(path)) for path in sorted(folder.iterdir())}
    content = {"files": files, "facts": facts}
    manifest = {"checksum": _checksum(content), **content}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return facts


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _measured(path: Path) -> tuple[int, int]:
    """Return size and checksum."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return path.stat().st_size, checksum


def _read_facts(folder: Path) -> dict[str, Any]:
    """Return what was recorded with the files of a store, each of which is read for that.

    Raises:
        InputError: one is not what was written; the message names it.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json_object(path, _FIX)
        if manifest.pop("checksum") != _checksum(manifest):
            raise ValueError("its checksum is another")
        for name, expected in manifest["files"].items():
            path = folder / name
            if list(_measured(path)) != expected:
                raise ValueError("its checksum is another")
        return dict(manifest["facts"])
    except InputError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not what was written ({error}): {_FIX}") from error


def _checked_facts(folder: Path) -> dict[str, Any] | None:
    """Return what was recorded with the files; None where they are missing.

    Damaged ones are removed, and so is what is no folder: those that use them keep them mapped all
    the same.
    """
    if not os.path.lexists(folder):
        return None
    try:
        return _read_facts(folder)
    except InputError as error:
        LOGGER.warning("The cached pairs %s are damaged (%s) and are made anew.", folder, error)
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with suppress(OSError):
                folder.unlink()
        return None
