"""Hostile JSON ends in one sentence that names file, place and fix, for every reader."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import powernorm
from powernorm import json_reading
from powernorm.errors import InputError
from powernorm.integrations.pretrained import build_from_config, is_pretrained
from powernorm.json_reading import MAX_DEPTH, parse_json, read_json, read_json_object
from powernorm.option_values import parse_options
from powernorm_lab.engine.folders import read_json as read_run_json
from powernorm_lab.report.loading import read_diagnosis

HOSTILE = {
    "empty": (b"", r"line 1: not JSON \(Expecting value\)"),
    "cut off": (b'{"a": 1,\n"b": [1,', "line 2: not JSON"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000, "nested too deeply"),
    "a little too deep": (b"[" * 65 + b"]" * 65, "nested too deeply"),
    "digits": (b'{"a": ' + b"1" * 5000 + b"}", "a number of thousands of digits"),
    "NaN": (b'{"a": NaN}', "holds NaN, which is not JSON"),
    "Infinity": (b'{"a": [-Infinity]}', "holds -Infinity, which is not JSON"),
    "bytes": (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
    "large": (b'{"a": "' + b"x" * 2000 + b'"}', "more than 6000 bytes|more than 1000 bytes"),
}


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, str]:
    if request.param == "large":
        monkeypatch.setattr(json_reading, "MAX_BYTES", 1000)
    found: tuple[bytes, str] = HOSTILE[request.param]
    return found


def test_what_cannot_be_read(hostile: tuple[bytes, str], tmp_path: Path) -> None:
    content, message = hostile
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for read in (read_json, read_json_object):
        with pytest.raises(InputError, match=rf"^{path}.*({message}).*; mend it$"):
            read(path, "mend it")


READERS: dict[str, Callable[[Path], Any]] = {
    "run folder": read_run_json,
    "report": read_diagnosis,
    "pretrained": lambda path: build_from_config(path),
}


@pytest.mark.parametrize("reader", READERS)
def test_all_readers_say_so(reader: str, hostile: tuple[bytes, str], tmp_path: Path) -> None:
    content, message = hostile
    path = tmp_path / "config.json"
    path.write_bytes(content)
    if reader == "pretrained" and message.endswith("which is not JSON"):
        message = "has no model_type"  # transformers writes such numbers
    with pytest.raises(InputError, match=rf"^{path}.*({message})"):
        READERS[reader](path)
    assert not is_pretrained(tmp_path)


def test_a_saved_model(hostile: tuple[bytes, str], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    text = hostile[0].decode("utf-8", "replace")
    save_file({}, tmp_path / "powernorm.safetensors", {"powernorm": text, "format": "pt"})
    with pytest.raises(InputError, match=str(tmp_path)):
        powernorm.load(tmp_path, nn.Linear(2, 2))
    powernorm.save(nn.Sequential(powernorm.BatchNorm(2)), tmp_path)
    (tmp_path / "config.json").write_bytes(hostile[0])
    with pytest.raises(InputError, match=str(tmp_path)):
        powernorm.load(tmp_path, nn.Sequential(powernorm.BatchNorm(2)))


def test_values_of_options() -> None:
    """A text that is not JSON stays a text, which the norm then refuses by its name."""
    deep, long = "[" * 100_000, "1" * 5000
    options = parse_options([f"a={deep}", f"b={long}", "c=NaN", "d=1e-5", "e=2"])
    assert options == {"a": deep, "b": long, "c": "NaN", "d": 1e-5, "e": 2}


def test_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": 1, "ö": ["\\ud83d\\ude42", null, 1e400], "a": 2}', encoding="utf-8")
    assert read_json_object(path, "") == {"a": 2, "ö": ["🙂", None, float("inf")]}
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(deepest, "", "")) == deepest
    with pytest.raises(InputError, match=r"^a\.jsonl, line 7: not JSON .*; mend it$"):
        parse_json("{", "a.jsonl", "mend it", line=7)
    path.write_text("[]")
    with pytest.raises(InputError, match="holds list, expected an object"):
        read_json_object(path, "")
    with pytest.raises(InputError, match=r"none\.json: cannot be read \(No such file"):
        read_json(tmp_path / "none.json", "")
