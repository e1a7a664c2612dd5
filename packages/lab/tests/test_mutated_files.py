"""Damaged, edited or replaced files: a command refuses them in one line, or works without them.

`mutated_samples` explains how to test more of them.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from file_fuzzer import Fuzzer
from file_mutations import CHANGES, Place
from mutated_samples import make, samples
from powernorm.json_reading import seal_json

NUMBER = int(os.environ.get("POWERNORM_MUTATIONS", "30"))
SEED = os.environ.get("POWERNORM_MUTATION_SEED", "0")
NAMES = [sample.name for sample in samples()]
Fuzzers = Callable[[str], Fuzzer]


@pytest.fixture(scope="module")
def fuzzers(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Fuzzers:
    """Return fuzzers by sample, which are made on first use."""
    made: dict[str, Fuzzer] = {}

    def fuzzer(name: str) -> Fuzzer:
        if name not in made:
            (sample,) = (one for one in samples() if one.name == name)
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            make(sample, folder / "sample", shared_cache)
            made[name] = Fuzzer(sample, folder / "copies", shared_cache)
        return made[name]

    return fuzzer


def check(fuzzer: Fuzzer, number: int) -> None:
    drawn = [fuzzer.draw(f"{SEED}-{count}") for count in range(number)]
    findings = [one for one in drawn if one is not None]
    assert not findings, "\n".join(map(str, findings))


@pytest.mark.parametrize(("name", "number"), [("saved", 40)])
def test_a_few(fuzzers: Fuzzers, name: str, number: int) -> None:
    check(fuzzers(name), number)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many(fuzzers: Fuzzers, name: str) -> None:
    fuzzer = fuzzers(name)
    check(fuzzer, NUMBER)
    assert sum(fuzzer.counts.values()) > NUMBER / 2
    endings = {ending for *_, ending in fuzzer.counts}
    assert {"done", "refused"} <= endings


@pytest.mark.slow
def test_the_result_of_another_run_is_refused(fuzzers: Fuzzers) -> None:
    file = Path("runs/bn-seed0/result.json")
    assert fuzzers("own").check("0", "result.json", file, "exchange", "compare") is None


@pytest.mark.slow
def test_a_result_of_other_types_is_named(
    fuzzers: Fuzzers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(_: random.Random, path: Path, __: Place) -> bool:
        value = {**json.loads(path.read_text()), "seconds": "long"}
        path.write_text(json.dumps(seal_json(value)))
        return True

    monkeypatch.setitem(CHANGES, "text", change)
    file = Path("runs/bn-seed0/result.json")
    assert fuzzers("own").check("0", "result.json", file, "text", "compare") is None
