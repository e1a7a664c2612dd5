import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powernorm.data.cache import cache_folder
from powernorm.data.pair_store import MANIFEST, PairWriter, found_or_made, read_split
from powernorm.errors import InputError


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
