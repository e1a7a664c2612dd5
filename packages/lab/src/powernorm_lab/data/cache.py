"""A cache folder of encoded texts, with keys that identify their sources."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from safetensors import safe_open

from powernorm.checksums import save_sealed_tensors, seal_of
from powernorm.files import check_own, is_draft

if TYPE_CHECKING:
    from torch import Tensor  # not imported: commands without torch need the cache's folder

LOGGER = logging.getLogger(__name__)
_ABANDONED_AFTER: Final = 24 * 60 * 60
"""Seconds without a change after which a draft counts as abandoned."""


class Encoded(NamedTuple):
    """An encoded text."""

    tensors: Mapping[str, Tensor]
    """Tensors that share no memory; those from the cache are memory-mapped."""
    texts: Mapping[str, str]
    """Further strings, such as the subwords as JSON."""


def cache_folder() -> Path:
    """Return `$POWERNORM_CACHE`, or `powernorm` in `$XDG_CACHE_HOME` or in `~/.cache`."""
    chosen = os.environ.get("POWERNORM_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "powernorm"


def cache_key(**parts: Any) -> str:
    """Return a hash of JSON values as a file name."""
    packed = json.dumps(parts, sort_keys=True).encode()
    return hashlib.sha256(packed).hexdigest()[:32]


def found_or_made(name: str, make: Callable[[], Encoded]) -> Encoded:
    """Return an entry of the cache, or make it.

    An entry is a safetensors file with a checksum, written atomically, so that incomplete or
    damaged entries are never used. If the cache is not writable, a warning is logged.

    Args:
        name: name of the file, without `.safetensors`.
        make: encodes the text.
    """
    path = cache_folder() / f"{name}.safetensors"
    found = _read(path)
    if found is not None:
        return found
    made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        save_sealed_tensors(made.tensors, path, made.texts)
    except OSError as error:
        LOGGER.warning(
            "The cache %s cannot be written (%s), so every start encodes the text again: set "
            "POWERNORM_CACHE to a writable folder.",
            path.parent,
            error.strerror,
        )
        return made
    return _read(path) or made


def _read(path: Path) -> Encoded | None:
    check_own(path)
    try:
        if seal_of(path) != "whole":
            LOGGER.warning("%s of the cache is damaged and is encoded again.", path)
            return None
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return Encoded(tensors, file.metadata())
    except OSError:
        return None


def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished files of killed processes."""
    latest = time.time() - _ABANDONED_AFTER
    for path in folder.glob(".*"):
        with suppress(OSError):
            if is_draft(path.name) and path.lstat().st_mtime < latest:
                path.unlink()
