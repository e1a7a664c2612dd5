"""Downloading files by HTTP, each compared with the known sum before it has its name."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from powernorm.errors import InputError

TIMEOUT: Final = 30
"""Seconds without a byte after which a server counts as lost."""


def download_file(
    urls: Sequence[str], sha256: str, size: int, target: Path, advance: Callable[[int], None]
) -> str:
    """Download a file from the first of its addresses that has it.

    Args:
        urls: where it is, the likeliest first.
        sha256: its known sum.
        size: in bytes; no more than about that is read.
        target: the file to write, in an existing folder.
        advance: is told how many more bytes have come.

    Returns:
        The address that it came from.

    Raises:
        InputError: no address gives that file; says why.
        OSError: the folder cannot be written.
    """
    reasons = []
    for url in urls:
        reason = _try(url, sha256, target, _Progress(size, advance))
        if reason is None:
            return url
        reasons.append(f"{url}: {reason}")
    raise InputError(f"{target.name} could not be downloaded ({'; '.join(reasons)})")


def _try(url: str, sha256: str, target: Path, progress: "_Progress") -> str | None:
    """Download from one address; returns why it failed."""
    import pooch
    from requests import RequestException

    downloader = pooch.HTTPDownloader(progressbar=progress, timeout=TIMEOUT, chunk_size=1 << 16)
    try:
        with _quiet(pooch.get_logger()):
            pooch.retrieve(
                url, f"sha256:{sha256}", target.name, target.parent, downloader=downloader
            )
    except RequestException as error:
        return " ".join(str(error).split())
    except ValueError as error:  # another sum, or an address that is none
        return " ".join(str(error).split())
    return None


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Progress:
    """What pooch tells of a download; ends one that is larger than the known file."""

    def __init__(self, size: int, advance: Callable[[int], None]) -> None:
        self.total = size
        self._size, self._advance = size, advance
        self._num_read = self._num_told = 0

    def update(self, size: int) -> None:
        """Told after each block, whose size is rounded up."""
        if self._num_read > self._size:
            raise ValueError(f"more than the known {self._size} bytes")
        self._num_read += size
        told = min(self._num_read, self._size)
        self._advance(told - self._num_told)
        self._num_told = told

    def reset(self) -> None:
        """Told at the end, before the size is told once more."""
        self._num_read = 0

    def close(self) -> None:
        """Told when all is done."""
