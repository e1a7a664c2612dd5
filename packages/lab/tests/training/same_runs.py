"""Comparisons of run folders, and requirements on every one of them."""

import csv
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from powernorm.json_reading import read_json_object

OF_THE_CLOCK = {
    *("seconds", "tokens_per_second", "examples_per_second", "decoding_tokens_per_second"),
    *("parsing_sentences_per_second", "speed", "ran_on"),
}
NOT_COMPARED = {".html", ".db"}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def without_clock(value: Any) -> Any:
    """Return the same value without times and machines, tensors as lists."""
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in OF_THE_CLOCK}
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return [without_clock(v) for v in value] if isinstance(value, list | tuple) else value


def content(path: Path) -> Any:
    """Return the content of a file, parsed if its format is known."""
    if path.suffix == ".json":
        return without_clock(read_json_object(path, ""))
    if path.suffix == ".csv":
        return without_clock(rows(path))
    if path.suffix == ".ckpt":
        return without_clock(torch.load(path, weights_only=True))
    return path.read_bytes()


def files(folder: Path) -> list[Path]:
    """Return the files to compare, without TensorBoard's, whose names have the time."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        path
        for path in found
        if path.suffix not in NOT_COMPARED and "tensorboard" not in path.parts
    )


def assert_same_folder(one: Path, other: Path) -> None:
    """Check that files have bitwise equal contents: logs, checkpoints, results."""
    expected = files(one)
    assert {path.name for path in expected} >= {"result.json", "metrics.csv"}
    assert files(other) == expected
    for path in expected:
        assert content(other / path) == content(one / path), other / path
    # Unfinished files are removed when the run is over.
    assert not list(other.rglob(".*")), other


def assert_same_run(one: Path, other: Path) -> None:
    """Check that logs, weights, optimizer, averages and translations are bitwise equal."""
    for name in ("metrics.csv", "norms.csv"):
        assert rows(one / name) == rows(other / name), name
    contents = [
        torch.load(part / "checkpoints/last.ckpt", weights_only=True) for part in (one, other)
    ]
    assert contents[0]["step"] == contents[1]["step"]
    assert contents[0]["best"] == contents[1]["best"]
    states = [content["states"] for content in contents]
    groups = [state["optimizer"].pop("param_groups") for state in states]
    assert groups[0] == groups[1]  # texts are in it, too
    histories = [state.pop("validations")["losses"] for state in states]
    assert histories[0] == histories[1]
    for key in states[0]:
        first, second = (state[key] for state in states)
        torch.testing.assert_close(first, second, rtol=0, atol=0, msg=key)
    assert torch.equal(*(content["random"][0]["torch"] for content in contents))
    names = [{path.name for path in (part / "checkpoints").iterdir()} for part in (one, other)]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".safetensors"):
            first, second = (load_file(part / "checkpoints" / name) for part in (one, other))
            torch.testing.assert_close(first, second, rtol=0, atol=0, msg=name)
    texts = [part / "translations.tsv" for part in (one, other)]
    assert texts[0].exists() == texts[1].exists()
    if texts[0].exists():
        assert texts[0].read_bytes() == texts[1].read_bytes()


def assert_readable(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.name.startswith(".") or path.is_dir():
            continue
        if path.suffix == ".json":
            read_json_object(path, "")
        elif path.suffix == ".csv":
            assert all(None not in row.values() and None not in row for row in rows(path)), path
        elif path.suffix == ".ckpt":
            torch.load(path, weights_only=True)
        elif path.suffix == ".safetensors":
            load_file(path)
