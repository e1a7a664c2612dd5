import os
import time
from pathlib import Path

import pytest
import torch

from powernorm.errors import InputError
from powernorm_lab.data.cache import Encoded, cache_folder, found_or_made


def make() -> Encoded:
    tensors = {"ids": torch.arange(5, dtype=torch.int32), "none": torch.empty(0)}
    return Encoded(tensors, {"text": "\u2028 日本 \x00"})


def fail() -> Encoded:
    raise AssertionError("made again")


def test_a_second_start_finds_the_file_and_nothing_else_is_left() -> None:
    first, second = found_or_made("key", make), found_or_made("key", fail)
    for found in (first, second):
        torch.testing.assert_close(found.tensors, make().tensors)
        assert found.texts["text"] == "\u2028 日本 \x00"
    assert [path.name for path in cache_folder().iterdir()] == ["key.safetensors"]


def test_what_is_in_use_stays_when_the_file_goes() -> None:
    found_or_made("key", make)
    used = found_or_made("key", fail)
    (cache_folder() / "key.safetensors").unlink()
    found_or_made("key", lambda: Encoded({"ids": torch.zeros(5)}, {}))
    assert used.tensors["ids"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"half a file", b"\x08\0\0\0\0\0\0\0{}"])
def test_a_damaged_file_is_made_again(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    found_or_made("key", make)
    path = cache_folder() / "key.safetensors"
    path.unlink()  # the first result is memory-mapped from it
    path.write_bytes(content)
    for function in (make, fail):
        found = found_or_made("key", function)
        torch.testing.assert_close(found.tensors, make().tensors)
    assert "damaged" in caplog.text
    assert path.read_bytes() != content


def test_nothing_is_left_of_what_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("powernorm.checksums._seal_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found_or_made("key", make)
    assert list(cache_folder().iterdir()) == []


def test_another_process_may_be_quicker() -> None:
    def slow() -> Encoded:
        found_or_made("key", make)
        return make()

    assert found_or_made("key", slow).tensors["ids"].tolist() == [0, 1, 2, 3, 4]
    assert [path.name for path in cache_folder().iterdir()] == ["key.safetensors"]


def test_what_killed_processes_left_is_removed_after_a_day() -> None:
    cache_folder().mkdir()
    old, new, other = f".a.{'0' * 16}", f".b.{'1' * 16}", ".hidden"
    for name, hours in ((old, 25), (new, 23), (other, 25)):
        (cache_folder() / name).write_text("")
        os.utime(cache_folder() / name, (time.time() - 3600 * hours,) * 2)
    found_or_made("key", make)
    assert {path.name for path in cache_folder().iterdir()} == {new, other, "key.safetensors"}


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    cache_folder().mkdir()
    (cache_folder() / "key.safetensors").symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match=r"key\.safetensors is a link.*remove it"):
        found_or_made("key", make)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["no folder", "full disk"])
def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "no folder":
        (tmp_path / "a file").write_text("")
        monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "a file" / "cache"))
    else:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("powernorm.checksums._seal_safetensors", full)
    assert found_or_made("key", make).tensors["ids"].tolist() == [0, 1, 2, 3, 4]
    assert "every start encodes the text again: set POWERNORM_CACHE" in caplog.text
    assert not cache_folder().is_dir() or list(cache_folder().iterdir()) == []
