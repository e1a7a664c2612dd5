"""What two run folders have to have in common, and what every one of them has to be."""

import csv
import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def assert_same_run(one: Path, other: Path) -> None:
    """The same logs, weights, optimizer, averages and translations, if any, to the bit."""
    for name in ("metrics.csv", "norms.csv"):
        assert rows(one / name) == rows(other / name), name
    contents = [
        torch.load(part / "checkpoints/last.ckpt", weights_only=True) for part in (one, other)
    ]
    groups = [content["optimizer"].pop("param_groups") for content in contents]
    assert groups[0] == groups[1]  # texts are in it, too
    for key in ("step", "weights", "optimizer", "scaler", "memory", "is_over"):
        first, second = (content.get(key) for content in contents)
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
            json.loads(path.read_text())
        elif path.suffix == ".csv":
            assert all(None not in row.values() and None not in row for row in rows(path)), path
        elif path.suffix == ".ckpt":
            torch.load(path, weights_only=True)
        elif path.suffix == ".safetensors":
            load_file(path)
