"""A folder of results that cost time to make, found again by what they were made from."""

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
    from torch import Tensor  # late: commands without torch ask where the cache is

LOGGER = logging.getLogger(__name__)
_ABANDONED_AFTER: Final = 24 * 60 * 60
"""Seconds without a change after which nobody is writing a draft any more."""


class Encoded(NamedTuple):
    """An encoded text."""

    tensors: Mapping[str, Tensor]
    """Each with memory of its own; what was found is mapped from its file."""
    texts: Mapping[str, str]
    """Texts that go with them, such as the subwords."""


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


def found_or_made(name: str, make: Callable[[], Encoded]) -> Encoded:
    """Return what is in the cache under a name; where there is none, make it.

    It is one file of safetensors with a checksum, put in place in one step: no reader ever uses
    half of one or a damaged one. A cache that cannot be written costs time and memory and nothing
    else: it is logged, not raised.

    Args:
        name: of the file, without `.safetensors`.
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
            "The cache %s cannot be written (%s), and every start encodes the text anew: set "
            "POWERNORM_CACHE to a folder that can be written.",
            path.parent,
            error.strerror,
        )
        return made
    return _read(path) or made


def _read(path: Path) -> Encoded | None:
    check_own(path)
    try:
        if seal_of(path) != "whole":
            LOGGER.warning("%s of the cache is damaged and is made anew.", path)
            return None
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return Encoded(tensors, file.metadata())
    except OSError:
        return None


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes that were killed have left of files that they were writing."""
    latest = time.time() - _ABANDONED_AFTER
    for path in folder.glob(".*"):
        with suppress(OSError):
            if is_draft(path.name) and path.lstat().st_mtime < latest:
                path.unlink()
