import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powernorm.errors import InputError
from powernorm.lab.data.cache import cache_folder
from powernorm.lab.tasks.translation.store import (
    MANIFEST,
    PairWriter,
    append_text,
    found_or_made,
    read_split,
    read_text,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def make(folder: Path) -> dict[str, Any]:
    with PairWriter(folder, "train") as writer:
        for portion in ([[5, 6], []], [[7]]):
            writer.write("source", portion)
            writer.write("target", [row * 2 for row in portion])
    return {"pairs": 3}


def fail(folder: Path) -> dict[str, Any]:
    raise AssertionError(f"{folder} is made again")


def test_what_was_written_in_portions_is_read() -> None:
    store = found_or_made("key", make)
    part = read_split(store.folder, "train")
    assert len(part) == 3
    assert part.source.tokens.tolist() == [5, 6, 0, 0, 7, 0]
    assert part.target.tokens.tolist() == [5, 6, 5, 6, 0, 0, 7, 7, 0]
    assert part.target.lengths.tolist() == [5, 1, 3]
    assert store.facts == {"pairs": 3}


def test_a_second_start_finds_the_files_and_nothing_else_is_left() -> None:
    first, second = found_or_made("key", make), found_or_made("key", fail)
    assert first.folder == second.folder
    assert second.facts == {"pairs": 3}
    assert [path.name for path in cache_folder().iterdir()] == ["key.pairs"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, remove])
@pytest.mark.parametrize("name", ["train.source.ids", "train.target.lengths", MANIFEST])
def test_damaged_files_are_made_anew(
    damage: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = found_or_made("key", make)
    used = read_split(store.folder, "train")
    expected = (store.folder / name).read_bytes()
    if (name, damage) == (MANIFEST, flip):
        (store.folder / name).write_text(json.dumps({"files": []}))
    else:
        damage(store.folder / name)
    with caplog.at_level(logging.WARNING):
        again = found_or_made("key", make)
    assert "damaged" in caplog.text
    assert (again.folder / name).read_bytes() == expected
    if name != "train.source.ids":
        assert used.source.tokens.tolist() == [5, 6, 0, 0, 7, 0]


def without(part: str, name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        del manifest[part][name]

    return change


def empty(manifest: dict[str, Any]) -> None:
    manifest["files"] = {}


def of_another_format(manifest: dict[str, Any]) -> None:
    del manifest["checksum"]


@pytest.mark.parametrize(
    "change",
    [without("facts", "pairs"), without("files", "train.source.ids"), empty, of_another_format],
)
def test_an_incomplete_manifest_is_made_anew(
    change: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = found_or_made("key", make).folder / MANIFEST
    content = path.read_text()
    manifest = json.loads(content)
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert found_or_made("key", make).facts == {"pairs": 3}
    assert "damaged" in caplog.text
    assert path.read_text() == content


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder", "broken link"])
def test_what_is_no_store_is_replaced(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_folder().mkdir(exist_ok=True)
    place = cache_folder() / "key.pairs"
    other = tmp_path / "other"
    if kind == "file":
        place.write_text("text")
    else:
        place.symlink_to(other)
    if kind == "link to a file":
        other.write_text("kept")
    elif kind == "link to a folder":
        other.mkdir()
    assert found_or_made("key", make).folder == place
    assert "damaged" in caplog.text
    assert found_or_made("key", fail).facts == {"pairs": 3}
    assert other.exists() == ("to a" in kind)


def test_what_killed_preparations_left_is_removed_after_a_day() -> None:
    now = time.time()
    ages = {".a.pairs.1": 25, ".b.pairs.2": 23, ".c.pairs.3": 25, "d.pairs": 25, ".hidden": 25}
    for name, hours in ages.items():
        path = cache_folder() / name
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "train.source.ids").write_text("")
        # What is written to changes the file, not the folder.
        for part in (path / "inner" / "train.source.ids", path / "inner", path):
            os.utime(part, (now - 3600 * hours,) * 2)
    os.utime(cache_folder() / ".c.pairs.3" / "inner" / "train.source.ids", (now, now))
    found_or_made("key", make)
    left = {path.name for path in cache_folder().iterdir()}
    assert left == {".b.pairs.2", ".c.pairs.3", "d.pairs", ".hidden", "key.pairs"}


ODD = ["a\tb", "\u2028\x85\x0b\x1c", " end \r", "new\nline", '"\\"', "\ud800", "日本"]


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    pairs = [(text, text[::-1]) for text in ODD]
    for portion in (pairs[:3], [], pairs[3:]):
        append_text(tmp_path, "valid", portion)
    append_text(tmp_path, "test", [("x", "y")])
    assert read_text(tmp_path, "valid") == pairs
    assert read_text(tmp_path, "test") == [("x", "y")]


def test_nothing_is_left_of_what_was_interrupted() -> None:
    def interrupted(folder: Path) -> dict[str, Any]:
        make(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found_or_made("key", interrupted)
    assert list(cache_folder().iterdir()) == []


def test_another_process_may_be_quicker() -> None:
    def slow(folder: Path) -> dict[str, Any]:
        found_or_made("key", make)
        return {"pairs": len(folder.name)}

    assert found_or_made("key", slow).facts == {"pairs": 3}
    assert [path.name for path in cache_folder().iterdir()] == ["key.pairs"]


def test_without_a_cache_the_files_are_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "a file" / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    store = found_or_made("key", make)
    assert "cannot be written" in caplog.text
    assert "temporary folder, and every start encodes them anew; set POWERNORM_CACHE" in caplog.text
    part = read_split(store.folder, "train")
    assert store.folder.parent == tmp_path / "temporary"
    del store
    assert list((tmp_path / "temporary").iterdir()) == []
    assert part.source.tokens.tolist() == [5, 6, 0, 0, 7, 0]


def test_a_full_disk_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(folder: Path) -> dict[str, Any]:
        make(folder)
        raise OSError(28, "No space left on device")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(InputError, match=r"No space left.*free some space there, or set POWERNORM"):
        found_or_made("key", full)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert list(cache_folder().iterdir()) == []
