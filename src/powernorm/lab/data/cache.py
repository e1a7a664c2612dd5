"""A folder of results that cost time to make, found again by what they were made from."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, Final

from powernorm.checksums import read_sealed, sealed_header
from powernorm.files import write

LOGGER = logging.getLogger(__name__)
_OLDER_BEGINS: Final = (b"{", b"PK\x03\x04")
"""Of the files that were written before there were checksums: JSON and archives."""


def cache_folder() -> Path:
    """Return `$POWERNORM_CACHE`, or `powernorm` in `$XDG_CACHE_HOME` or in `~/.cache`."""
    chosen = os.environ.get("POWERNORM_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "powernorm"


def cache_key(**parts: Any) -> str:
    """Return a file name for what the parts, all JSON values, determine."""
    packed = json.dumps(parts, sort_keys=True).encode()
    return hashlib.sha256(packed).hexdigest()[:32]


def read_cached(name: str) -> bytes | None:
    """Return the content of a cached file, None where there is none that is as it was written."""
    path = cache_folder() / name
    try:
        with path.open("rb") as file:
            content = read_sealed(file)
            if content is not None:
                return content
            file.seek(0)
            content = file.read()
    except OSError:
        return None
    if content.startswith(_OLDER_BEGINS):
        return content
    LOGGER.warning("%s of the cache is damaged and is made anew.", path)
    return None


def write_cached(name: str, content: bytes) -> None:
    """Write a file of the cache in one step, so that no reader ever sees half of it.

    It has a checksum, so that none ever uses what is damaged.

    A cache that cannot be written costs time and nothing else: it is logged, not raised.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / name, sealed_header(content), content)
    except OSError as error:
        LOGGER.warning("The cache %s cannot be written (%s).", folder, error.strerror)
