"""Files of the installed distribution `powernorm-data`, with a check of their checksums."""

import hashlib
import lzma
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.integrations.extras import install_command
from powernorm_lab.data.sets.catalog import DataFile, DataSet

PACKAGE: Final = "powernorm_data"
"""A package of files only; it is not imported."""


def corpora_folder() -> Path | None:
    """Return the folder of the files; None if the distribution is not installed."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


def embedded_paths(entry: DataSet) -> list[Path]:
    """Return the paths of the files of an embedded data set.

    Raises:
        InputError: their package is not installed; the message gives the command to install it.
    """
    folder = corpora_folder()
    if folder is None and entry.files:
        raise InputError(
            f"the data set {entry.name} is in the package powernorm-data, which is not installed: "
            f"{install_command('powernorm-data')}; or give your own files with --data"
        )
    return [] if folder is None else [folder / file.name for file in entry.files]


def embedded_texts(entry: DataSet) -> list[str]:
    """Return the text of each file of an embedded data set, after a check of its checksum.

    Raises:
        InputError: the package is not installed, or a file has another checksum.
    """
    pairs = zip(embedded_paths(entry), entry.files, strict=True)
    return [lzma.decompress(_content(path, file)).decode() for path, file in pairs]


def _content(path: Path, file: DataFile) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {_again()}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise InputError(f"{path} has the sha256 {found}, expected {file.sha256}: {_again()}")
    return content


def _again() -> str:
    return f"install powernorm-data again: {install_command('powernorm-data')}"
