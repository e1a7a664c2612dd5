"""Checksums inside the files that they are of, so that one rename puts both in place.

A sum in a file of its own gets out of step with its file when a process is killed between the two
renames. Here it is a part of the file: the comment at the end of torch's zip archives, an entry of
the metadata of safetensors. Other programs read such files as ever. A file from before there were
sums has none of this and is `unsealed`; what lies between, such as a sum that was cut off, is
`damaged`.
"""

import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

from powernorm.errors import InputError
from powernorm.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

Seal = Literal["whole", "unsealed", "damaged"]
"""Whether a file has the sum that it was written with; `unsealed` is one without a sum."""

SAFETENSORS_KEY: Final = "powernorm_sha256"
_ZEROS: Final = "0" * 64
SAFETENSORS_SEAL: Final = {SAFETENSORS_KEY: _ZEROS}
"""Metadata to write a file of safetensors with, as the place for the sum of `_seal_safetensors`."""

_COMMENT: Final = b"powernorm sha256 "
_ARCHIVE_BEGIN: Final = b"PK\x03\x04"
_ARCHIVE_END: Final = b"PK\x05\x06"
_ARCHIVE_END_SIZE: Final = 22
"""Of the record that ends an archive; its last two bytes are the size of the comment after it."""
_SAFETENSORS_HEADER_LIMIT: Final = 100_000_000
"""Limit of safetensors itself."""
_LENGTH_SIZE: Final = 8
"""Bytes of the number that a file of safetensors begins with, the length of its header."""
_CHUNK: Final = 1 << 20


def save_sealed(value: Any, file: BinaryIO) -> None:
    """Write what `torch.save` writes, with its sum.

    Raises:
        OSError: the file cannot be written.
    """
    import torch  # late: the cache is asked by commands that need no torch

    # Straight into the file, torch hides the reason why it cannot be written.
    content = io.BytesIO()
    torch.save(value, content)
    seal_archive(content)
    file.write(content.getbuffer())
    file.flush()


def save_sealed_tensors(
    tensors: Mapping[str, "Tensor"], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a file of safetensors with its sum, in one step.

    Args:
        tensors: each with memory of its own.
        path: of the file.
        metadata: strings to go with them.

    Raises:
        OSError: the folder cannot be written.
        ModuleNotFoundError: safetensors is missing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(path) as draft:
            save_file(dict(tensors), draft.name, {**metadata, **SAFETENSORS_SEAL})
            written = Path(draft.name)
            # safetensors keeps a file to its owner; others shall read it as they do its neighbors.
            written.chmod(os.fstat(draft.fileno()).st_mode)
            with written.open("r+b") as file:
                _sort_metadata(file)
                _seal_safetensors(file)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else errno.EIO
        raise OSError(code, os.strerror(code)) from error


def load_sealed(path: Path, fix: str) -> Any:
    """Return what is in a file of `save_sealed` or, without a sum, of `torch.save`.

    Args:
        path: of the file.
        fix: what to do about a damaged one; the end of the error.

    Raises:
        InputError: it is damaged.
    """
    import torch

    check_seal(path, fix)
    return torch.load(path, map_location="cpu", weights_only=True)


def check_seal(path: Path, fix: str) -> Seal:
    """Check a file against the sum in it, and return whether it has one.

    Args:
        path: of the file.
        fix: what to do about a damaged one; the end of the error.

    Raises:
        InputError: it is damaged.
        OSError: it cannot be read.
    """
    seal = seal_of(path)
    if seal == "damaged":
        raise InputError(f"{path} is damaged, its bytes do not have their checksum: {fix}")
    return seal


def seal_of(path: Path) -> Seal:
    """Return whether a file has the sum that it was written with.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if path.suffix.lower() == ".safetensors":
            return _seal_of_safetensors(file)
        return _seal_of_archive(file)


def seal_archive(file: BinaryIO) -> None:
    """Give the zip archive in a file without a comment the sum of its bytes as the comment."""
    size = file.seek(0, io.SEEK_END)
    length = len(_COMMENT) + len(_ZEROS)
    file.seek(size - 2)
    file.write(length.to_bytes(2, "little") + _COMMENT)
    digest = _digest(file, ((0, size + len(_COMMENT)),))
    file.seek(0, io.SEEK_END)
    file.write(digest.encode())


def _seal_safetensors(file: BinaryIO) -> None:
    """Write the sum into a file of safetensors with the metadata `SAFETENSORS_SEAL`."""
    place = _place_in_safetensors(file)
    assert isinstance(place, int)
    digest = _digest(file, _around(file, place))
    file.seek(place)
    file.write(digest.encode())


def _sort_metadata(file: BinaryIO) -> None:
    """Put metadata into one order; safetensors writes them in another one each time."""
    size = int.from_bytes(file.read(_LENGTH_SIZE), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) <= size:  # as long as before, but for unusual characters
        file.seek(_LENGTH_SIZE)
        file.write(text.ljust(size))


def _seal_of_archive(file: BinaryIO) -> Seal:
    """Tell a sum that is right from a wrong one, and an archive without one from a part of one."""
    size = file.seek(0, io.SEEK_END)
    length = len(_COMMENT) + len(_ZEROS)
    tail = _bytes_at(file, max(0, size - _ARCHIVE_END_SIZE - length), size)
    written = _COMMENT + tail[-len(_ZEROS) :]
    if tail.startswith(_ARCHIVE_END) and tail.endswith(length.to_bytes(2, "little") + written):
        digest = _digest(file, ((0, size - len(_ZEROS)),))
        return "whole" if digest.encode() == tail[-len(_ZEROS) :] else "damaged"
    is_archive = _bytes_at(file, 0, len(_ARCHIVE_BEGIN)) == _ARCHIVE_BEGIN
    end = tail[-_ARCHIVE_END_SIZE:]
    is_ended = end.startswith(_ARCHIVE_END) and end.endswith(b"\0\0")
    return "damaged" if is_archive and not is_ended else "unsealed"


def _seal_of_safetensors(file: BinaryIO) -> Seal:
    place = _place_in_safetensors(file)
    if not isinstance(place, int):
        return place
    digest = _digest(file, _around(file, place))
    return "whole" if _bytes_at(file, place, place + len(_ZEROS)) == digest.encode() else "damaged"


def _place_in_safetensors(file: BinaryIO) -> int | Literal["unsealed", "damaged"]:
    """Return where the sum of a file of safetensors is."""
    size = file.seek(0, io.SEEK_END)
    begin = 8
    length = int.from_bytes(_bytes_at(file, 0, begin), "little")
    if size < begin or length > min(size - begin, _SAFETENSORS_HEADER_LIMIT):
        return "damaged"
    header = _bytes_at(file, begin, begin + length)
    # The quotes around a key stand alone only outside of strings.
    found = re.search(rf'"{SAFETENSORS_KEY}":"([^"]{{{len(_ZEROS)}}})"'.encode(), header)
    if found:
        return begin + found.start(1)
    return "damaged" if SAFETENSORS_KEY.encode() in header else "unsealed"


def _around(file: BinaryIO, place: int) -> tuple[tuple[int, int], ...]:
    """Return the parts of a file that the sum at a place is of: all but the sum itself."""
    return (0, place), (place + len(_ZEROS), file.seek(0, io.SEEK_END))


def _digest(file: BinaryIO, parts: tuple[tuple[int, int], ...]) -> str:
    """Return the SHA-256 of parts of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK))
    for begin, end in parts:
        file.seek(begin)
        while begin < end:
            count = file.readinto(chunk[: min(_CHUNK, end - begin)])  # type: ignore[attr-defined]
            if not count:
                break  # cut off meanwhile
            digest.update(chunk[:count])
            begin += count
    return digest.hexdigest()


def _bytes_at(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
