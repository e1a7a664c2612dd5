"""Seeded mutations of files, like those by other programs, or by full or broken disks."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from powernorm.checksums import save_sealed, save_sealed_tensors
from powernorm.json_reading import SEAL, seal_json

Change = Callable[[random.Random, Path, "Place"], bool]
"""Function that changes a file and returns whether it did."""


class Place:
    """Material for changes: similar files of other samples, and a folder outside."""

    def __init__(self, others: Sequence[Path], outside: Path) -> None:
        self.others, self.outside = others, outside


def hostile(chance: random.Random, outside: Path) -> Any:
    """Return a value that powernorm would never write."""
    deep: Any = 1
    for _ in range(chance.choice([5, 50, 500])):
        deep = [deep]
    return chance.choice(
        [
            *(None, True, False, -1, 0, 0.5, 10**30, -(10**18), 1e308, 2**63, 10**400),
            *(float("nan"), float("inf"), -float("inf")),
            *("", "x", "x" * 100_000, "\x00", "\x1b[2J\n\r", "\ud800", "a\u202eb", "{}", "1e5"),
            *("<script>alert(1)</script>", "%s%n{0}", "lm", "ln", "bn", "nosuch:Norm", "os:system"),
            *("../../x", "..", ".", "/", "/etc/passwd", "a/b", "~", str(outside), "../outside/run"),
            *(str(outside / "run"), "CON", "x" * 300, "checkpoints"),
            *([], [[]], {}, {"": {}}, [None], [1, "a", {}], {"a": [1]}, deep),
            [0] * 5000,
        ]
    )


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all containers in a value with each of their keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield value, key
            yield from places_in(item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield value, index
            yield from places_in(item)


def spoiled(chance: random.Random, value: Any, outside: Path) -> Any:
    """Return a value with one part replaced, removed or renamed."""
    places = [
        place
        for place in places_in(value)
        if place[1] != SEAL and not (place[0] is value and place[1] == "format")
    ]
    if not places or chance.random() < 0.03:
        return hostile(chance, outside)
    # All depths are equally likely, because most of a file is in a few long lists.
    container, key = chance.choice(places[: max(1, int(len(places) * chance.random()))])
    what = chance.random()
    if what < 0.12:
        del container[key]
    elif what < 0.2 and isinstance(container, dict):
        container[str(hostile(chance, outside))[:400]] = container.pop(key)
    elif what < 0.3:
        other, at = chance.choice(places)
        container[key] = json.loads(json.dumps(other[at])) if at in _keys(other) else None
    else:
        container[key] = hostile(chance, outside)
    return value


def _keys(value: Any) -> Any:
    return value if isinstance(value, dict) else range(len(value))


def flip(chance: random.Random, path: Path, _: Place) -> bool:
    content = bytearray(path.read_bytes())
    for _number in range(chance.randint(1, 4)):
        if content:
            content[chance.randrange(len(content))] ^= chance.randint(1, 255)
    path.write_bytes(content)
    return True


def truncate(chance: random.Random, path: Path, _: Place) -> bool:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(max(1, len(content)))])
    return True


def empty(_: random.Random, path: Path, __: Place) -> bool:
    path.write_bytes(b"")
    return True


def insert(chance: random.Random, path: Path, _: Place) -> bool:
    content = path.read_bytes()
    at = chance.randint(0, len(content))
    byte = chance.choice([chance.randbytes(1), b"\n", b"\0", b",", b'"', b"0"])
    path.write_bytes(content[:at] + byte + content[at:])
    return True


def delete(_: random.Random, path: Path, __: Place) -> bool:
    path.unlink()
    return True


def exchange(chance: random.Random, path: Path, place: Place) -> bool:
    others = [one for one in place.others if one.read_bytes() != path.read_bytes()]
    if not others:
        return False
    shutil.copyfile(chance.choice(others), path)
    return True


def link(chance: random.Random, path: Path, place: Place) -> bool:
    target = place.outside / f"target-{path.name}"
    kind = chance.choice(["same", "missing", "folder", "pipe"])
    if kind == "same":
        shutil.copyfile(path, target)
    elif kind == "folder":
        target = place.outside
    elif kind == "pipe":
        os.mkfifo(target)
    path.unlink()
    path.symlink_to(target)
    return True


def folder(chance: random.Random, path: Path, _: Place) -> bool:
    path.unlink()
    path.mkdir()
    if chance.random() < 0.5:
        (path / "note").write_text("mine")
    return True


def spoil_json(chance: random.Random, path: Path, place: Place) -> bool:
    """Write a hostile value with the old seal."""
    if path.suffix != ".json":
        return False
    value = spoiled(chance, json.loads(path.read_bytes()), place.outside)
    path.write_text(json.dumps(value), "utf-8")
    return True


def seal_spoiled(chance: random.Random, path: Path, place: Place) -> bool:
    """Write a hostile value with a valid seal."""
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        at = chance.randrange(len(lines))
        lines[at] = json.dumps(spoiled(chance, json.loads(lines[at]), place.outside))
        path.write_text("\n".join(lines) + "\n", "utf-8")
    elif path.suffix == ".json":
        value = spoiled(chance, json.loads(path.read_bytes()), place.outside)
        if isinstance(value, dict):
            try:
                value = seal_json(value)
            except ValueError:  # a number of thousands of digits
                return False
        path.write_text(json.dumps(value), "utf-8")
    elif path.suffix == ".ckpt":
        value = torch.load(path, map_location="cpu", weights_only=True)
        file = io.BytesIO()
        save_sealed(_spoiled_state(chance, value, place.outside), file)
        path.write_bytes(file.getvalue())
    elif path.suffix == ".safetensors":
        return _seal_spoiled_tensors(chance, path, place)
    else:
        return _spoil_cell(chance, path, place)
    return True


def _spoiled_state(chance: random.Random, value: Any, outside: Path) -> Any:
    value = _plain(value)
    places = [p for p in places_in(value) if p[1] != "format"]
    container, key = chance.choice(places[: max(1, int(len(places) * chance.random()))])
    old = container[key]
    if isinstance(old, Tensor) and chance.random() < 0.7:
        container[key] = _other_tensor(chance, old)
    elif chance.random() < 0.2:
        del container[key]
    else:
        container[key] = hostile(chance, outside)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _other_tensor(chance: random.Random, old: Tensor) -> Tensor:
    return chance.choice(
        [
            old.new_zeros((*old.shape, 2)),
            old.flatten()[: max(0, old.numel() - 1)].clone(),
            old.new_empty(0),
            old.to(torch.int64 if old.is_floating_point() else torch.float32),
            old.to(torch.complex64) if old.is_floating_point() else old.to(torch.bool),
            torch.full_like(old, float("nan")) if old.is_floating_point() else old + 1,
            torch.zeros(()),
        ]
    )


def _seal_spoiled_tensors(chance: random.Random, path: Path, place: Place) -> bool:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = {k: v for k, v in (file.metadata() or {}).items() if k != "powernorm_sha256"}
    if metadata and chance.random() < 0.5:
        key = chance.choice(sorted(metadata))
        try:
            value = spoiled(chance, json.loads(metadata[key]), place.outside)
            metadata[key] = json.dumps(value)
        except ValueError:
            metadata[key] = str(hostile(chance, place.outside))
        metadata[key] = metadata[key].encode("utf-8", "replace").decode()
    else:
        name = chance.choice(sorted(tensors))
        if chance.random() < 0.3:
            tensors[chance.choice(["", "x", "../x", name + ".x"])] = tensors.pop(name)
        else:
            tensors[name] = _other_tensor(chance, tensors[name]).contiguous()
    save_sealed_tensors(tensors, path, metadata)
    return True


def _spoil_cell(chance: random.Random, path: Path, place: Place) -> bool:
    """Spoil a cell of a table."""
    if path.suffix not in (".csv", ".tsv"):
        return False
    mark = "," if path.suffix == ".csv" else "\t"
    rows = [line.split(mark) for line in path.read_text().splitlines()]
    row = chance.choice(rows)
    text = str(hostile(chance, place.outside)).encode("utf-8", "replace").decode()
    row[chance.randrange(len(row))] = text
    path.write_text("\n".join(mark.join(row) for row in rows) + "\n", "utf-8")
    return True


CHANGES: dict[str, Change] = {
    "flip": flip,
    "truncate": truncate,
    "empty": empty,
    "insert": insert,
    "delete": delete,
    "exchange": exchange,
    "link": link,
    "folder": folder,
    "spoil": spoil_json,
    "seal": seal_spoiled,
}
WEIGHTS = {"flip": 3, "truncate": 2, "insert": 2, "exchange": 2, "link": 2, "spoil": 2, "seal": 8}
