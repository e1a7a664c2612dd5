import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from served_sets import FILES, NOWHERE, Server, archived, make_entry, served, zipped

from powernorm.errors import InputError
from powernorm_lab.data import catalog, fetching
from powernorm_lab.data.catalog import DataSet
from powernorm_lab.data.fetching import cached_state, fetch, fetched, remove


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served() as running:
        yield running


@pytest.fixture
def fake(server: Server, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    return installed(monkeypatch, make_entry(server.address))


def installed(monkeypatch: pytest.MonkeyPatch, entry: DataSet) -> DataSet:
    monkeypatch.setattr(catalog, "SETS", dict(catalog.SETS) | {entry.name: entry})
    return entry


def nothing_is_left(cache: Path) -> bool:
    return not (cache / "data").exists() or not list((cache / "data").iterdir())


@pytest.mark.parametrize("kind", ["files", "archive"])
def test_the_files_come_and_no_others(
    kind: str, fake: DataSet, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories in the archive are removed, and the files are readable by other users."""
    entry = installed(monkeypatch, archived(fake, zipped())) if kind == "archive" else fake
    told: list[int] = []
    mask = os.umask(0o022)
    try:
        assert fetch("fake", on_progress=told.append)
    finally:
        os.umask(mask)
    folder = fetched("fake")
    assert folder == own_cache / "data" / "fake"
    assert [path.name for path in folder.parent.iterdir()] == ["fake"]
    assert sorted(path.name for path in folder.iterdir()) == ["README.txt", *sorted(FILES)]
    for name, content in FILES.items():
        assert (folder / name).read_bytes() == content
        assert (folder / name).stat().st_mode & 0o777 == 0o644
    assert folder.stat().st_mode & 0o777 == 0o755
    text = (folder / "README.txt").read_text()
    address = entry.archive.url if entry.archive else entry.mirrors[0]
    assert f"Source: a pack of 1.0, {address}\nLicense: CC0 1.0.\n" in text
    assert sum(told) == entry.download_size
    assert min(told) >= 0


def test_a_second_time_does_nothing_unless_forced(fake: DataSet, server: Server) -> None:
    fetch(fake.name)
    before = (fetched("fake") / "test.txt").stat().st_mtime_ns
    server.asked.clear()
    assert not fetch("fake")
    assert not server.asked
    assert fetch("fake", force=True)
    assert (fetched("fake") / "test.txt").stat().st_mtime_ns > before


def test_absent_and_removed_are_told_with_the_fix(fake: DataSet, own_cache: Path) -> None:
    with pytest.raises(InputError, match=r"fake is not here: run `powernorm data get fake`"):
        fetched("fake")
    assert not remove("fake")
    fetch(fake.name)
    (own_cache / "data" / "fake" / "mine.txt").write_text("the user's own")
    assert remove("fake")
    with pytest.raises(InputError, match="is not here"):
        fetched("fake")
    assert [path.name for path in (own_cache / "data" / "fake").iterdir()] == ["mine.txt"]
    fetch("fake")
    assert (fetched("fake") / "mine.txt").exists()


def test_files_that_the_user_puts_there_by_hand_count(fake: DataSet, own_cache: Path) -> None:
    for name, content in FILES.items():
        path = own_cache / "data" / fake.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert fetched("fake") == path.parent
    assert remove("fake")
    assert nothing_is_left(own_cache)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "has 3997 bytes, expected 4000"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "has the sha256 .* expected"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_damage_is_noticed_and_fixed(fake: DataSet, harm: object, message: str) -> None:
    fetch(fake.name)
    path = fetched("fake") / "train.txt"
    harm(path)  # type: ignore[operator]
    same_size = path.exists() and path.stat().st_size == len(FILES["train.txt"])
    assert cached_state("fake") == ("whole" if same_size else "damaged")
    assert cached_state("fake", thorough=True) == "damaged"
    with pytest.raises(InputError, match=f"fake is damaged: .*train.txt ({message}).*data get"):
        fetched("fake")
    assert fetch("fake")
    assert path.read_bytes() == FILES["train.txt"]


def test_the_second_mirror_serves_what_the_first_has_not(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.pages = {f"/second/{name}": content for name, content in FILES.items()}
    mirrors = (f"{server.address}/first", f"{server.address}/second")
    installed(monkeypatch, replace(make_entry(NOWHERE), mirrors=mirrors))
    assert fetch("fake")
    assert server.asked == [
        *("/first/train.txt", "/second/train.txt"),
        *("/first/test.txt", "/second/test.txt"),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "404"),
        (b"x" * 4000, "does not match the known hash"),
        (b"x" * 10_000_000, "more than the known 4000 bytes"),
    ],
)
def test_another_file_is_refused_and_nothing_is_kept(
    content: bytes | None, reason: str, fake: DataSet, server: Server, own_cache: Path
) -> None:
    del server.pages["/train.txt"]
    if content is not None:
        server.pages["/train.txt"] = content
    with pytest.raises(InputError, match=f"train.txt could not be downloaded .*{reason}"):
        fetch(fake.name)
    assert nothing_is_left(own_cache)


def test_another_file_in_the_archive_is_refused_and_nothing_is_kept(
    fake: DataSet, server: Server, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = zipped({**FILES, "test.txt": b"xhree four\n" * 50})
    server.pages["/pack.zip"] = other
    installed(monkeypatch, archived(fake, other))
    with pytest.raises(InputError, match=r"fake is not the known .*test.txt has the sha256 .* exp"):
        fetch("fake")
    assert nothing_is_left(own_cache)


def test_no_network_names_what_to_do_by_hand(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    entry = installed(monkeypatch, make_entry(NOWHERE))
    advice = f"train.txt, test.txt from {NOWHERE} into {own_cache / 'data' / 'fake'} by hand"
    with pytest.raises(InputError, match=rf"refused.*HTTPS_PROXY.*put {advice}"):
        fetch("fake")
    installed(monkeypatch, archived(entry, zipped()))
    with pytest.raises(InputError, match=rf"put .* out of the zip archive {NOWHERE}/pack.zip into"):
        fetch("fake")
    assert nothing_is_left(own_cache)


def test_an_interrupt_leaves_nothing(fake: DataSet, own_cache: Path) -> None:
    def stop(size: int) -> None:
        if size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(fake.name, on_progress=stop)
    assert nothing_is_left(own_cache)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"No space left on device\): free some space, or set POWERNORM_CACHE"),
        (errno.EACCES, r"Permission denied\): make it writable, or set POWERNORM_CACHE"),
    ],
)
def test_a_disk_that_takes_no_more_leaves_nothing(
    fake: DataSet, own_cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def fail(scratch: Path, entry: DataSet) -> None:
        del scratch, entry
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fetching, "install", fail)
    with pytest.raises(InputError, match=message):
        fetch(fake.name)
    assert nothing_is_left(own_cache)


def test_a_cache_that_is_no_folder_is_named(fake: DataSet, own_cache: Path) -> None:
    own_cache.write_text("a file")
    with pytest.raises(InputError, match=r"cannot be written .*POWERNORM_CACHE"):
        fetch(fake.name)


def test_half_made_folders_of_killed_processes_are_swept(fake: DataSet, own_cache: Path) -> None:
    old, young = own_cache / "data" / ".fake.old", own_cache / "data" / ".fake.young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "part").write_text("half")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    fetch(fake.name)
    assert not old.exists()
    assert young.exists()


def test_many_at_once_do_no_harm(fake: DataSet, own_cache: Path) -> None:
    fetch(fake.name)
    done = threading.Event()

    def read() -> int:
        count = 0
        while not done.is_set():
            for name, content in FILES.items():
                assert (fetched("fake") / name).read_bytes() == content
            count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        reader = pool.submit(read)
        writers = [pool.submit(fetch, "fake", force=True) for _ in range(40)]
        assert all(writer.result() for writer in writers)
        done.set()
        assert reader.result() > 0
    for _ in range(10):
        remove("fake")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: fetch("fake"), range(4)))
        assert cached_state("fake", thorough=True) == "whole"
        assert [path.name for path in (own_cache / "data").iterdir()] == ["fake"]


def test_unclear_rights_need_consent(
    server: Server, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, make_entry(server.address, "unclear", "Somebody may own this."))
    with pytest.raises(InputError, match=r"your consent: Somebody may own this\. .* --accept"):
        fetch("unclear")
    assert nothing_is_left(own_cache)
    assert fetch("unclear", accept=True)
    assert "Somebody may own this." in (fetched("unclear") / "README.txt").read_text()
    # The set is there already: no request is made.
    assert not fetch("unclear")


def test_other_kinds_are_not_fetched() -> None:
    with pytest.raises(InputError, match=r"turkish comes with powernorm.*--data turkish"):
        fetch("turkish")
    with pytest.raises(InputError, match=r"ptb cannot be fetched; get its files.*--data"):
        fetched("ptb")
    with pytest.raises(InputError, match=r"no data set 'Mnits': did you mean mnist\? .*enwik8"):
        remove("Mnits")


def test_names_say_where_they_are(own_cache: Path) -> None:
    assert fetching.places("mnist") == [own_cache / "data" / "mnist"]
    web, wiki = fetching.places("turkish")
    assert web.is_file()
    assert wiki.is_file()
    assert cached_state("turkish") == "whole"
    assert cached_state("mnist") == "absent"
    assert cached_state("ptb") is None
