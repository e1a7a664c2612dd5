"""Fuzzer that mutates files, runs commands that read them, and checks the outcomes."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from file_mutations import CHANGES, WEIGHTS, Place
from mutated_samples import DRAWN, Sample, action_of, contents, files_of, kind_of, pages
from powernorm.json_reading import SEAL
from watched import Outcome, run_watched

TRAINING = ("compare", "tune", "remove", "work")


@dataclass
class Finding:
    """An outcome that must not happen."""

    sample: str
    command: str
    file: str
    change: str
    seed: str
    what: str

    def __str__(self) -> str:
        where = f"{self.sample}: {self.command} after {self.change} of {self.file}"
        return f"{where} (seed {self.seed})\n  {self.what}"


class Fuzzer:
    """Fuzzer of the files of one sample."""

    def __init__(self, sample: Sample, folder: Path, cache: Path) -> None:
        self.sample, self.folder, self.cache = sample, folder, cache
        self.counts: Counter[tuple[str, str, str, str]] = Counter()
        """Counts by kind of file, command, change and outcome."""
        self.failures: list[Finding] = []
        """Commands that failed like a training, with exit code 1, for a file with a valid seal."""
        self.files: dict[str, list[Path]] = {}
        for path in files_of(sample):
            self.files.setdefault(kind_of(path), []).append(path)

    def baseline(self, name: str) -> dict[str, Any]:
        """Return the contents after a command on the unchanged sample."""
        if name not in self.sample.whole:
            home, _ = self._copy()
            outcome = self._run(home, name)
            self.sample.whole[name] = {
                "code": outcome.code,
                "error": outcome.error,
                "contents": contents(home, None),
                "pages": pages(home, None),
                "out": outcome.out,
                "outside": outcome.outside,
                "raised": outcome.raised,
            }
        return self.sample.whole[name]

    def _copy(self) -> tuple[Path, Path]:
        shutil.rmtree(self.folder, ignore_errors=True)
        home = shutil.copytree(self.sample.home, self.folder / "home")
        outside = self.folder / "outside"
        outside.mkdir()
        run = next((path.parent for path in home.glob("runs/*/config.json")), None)
        if run is not None:
            shutil.copytree(run, outside / "run")
        return home, outside

    def _run(self, home: Path, name: str, *, draws: bool = False) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            if not draws:
                patch.setattr(Figure, "savefig", _draw_nothing)
            # A mutation that makes a run longer is not a finding, and costs time.
            return run_watched(home, action_of(self.sample.commands[name]), self.cache, seconds=30)

    def draw(self, seed: str) -> Finding | None:
        """Mutate a file and run a command, both chosen by the seed, and check the outcome."""
        chance = random.Random(seed)
        kind = chance.choice(sorted(self.files))
        file = chance.choice(self.files[kind])
        change = chance.choices(list(CHANGES), [WEIGHTS.get(one, 1) for one in CHANGES])[0]
        name = chance.choice(sorted(self.sample.commands))
        return self.check(seed, kind, file, change, name)

    def check(self, seed: str, kind: str, file: Path, change: str, name: str) -> Finding | None:
        """Check the outcome of a given mutation and command."""
        chance = random.Random(f"{seed} {file} {change} {name}")
        whole = self.baseline(name)
        home, outside = self._copy()
        others = [
            home / one for one in files_of(self.sample) if one.name == file.name and one != file
        ]
        if not CHANGES[change](chance, home / file, Place(others, outside)):
            return None
        kept, is_there = contents(outside, None), (home / file).exists()
        draws = chance.random() < DRAWN
        outcome = self._run(home, name, draws=draws)
        problem = self._problem(outcome, whole, home, file, change)
        is_shown = is_there and not draws and self.sample.commands[name][0] not in TRAINING
        if not problem and outcome.code == 0 and is_shown and self._must_be_whole(file, change):
            problem = _shown_otherwise(outcome, whole, home, file)
        if contents(outside, None) != kept:
            problem = "files outside are not what they were"
        ending = "wrong" if problem else {0: "done", 2: "refused"}.get(outcome.code, "failed")
        self.counts[kind, name, change, ending] += 1
        if ending == "failed":
            said = (outcome.err or outcome.raised)[-300:]
            self.failures.append(Finding(self.sample.name, name, str(file), change, seed, said))
        if not problem:
            return None
        return Finding(self.sample.name, name, str(file), change, seed, problem)

    def _problem(
        self, outcome: Outcome, whole: dict[str, Any], home: Path, file: Path, change: str
    ) -> str:
        if outcome.raised:
            if change == "seal" and "watched.HungError" in outcome.raised.splitlines()[-1]:
                return ""
            return _shortened(outcome.raised)
        written = [one for one in outcome.outside if one not in whole["outside"]]
        if written:
            return f"outside: {written[:5]}"
        if outcome.code == 2:
            if not outcome.error:
                return f"no one line: {outcome.err[-600:]}"
            names = (file.name, file.parent.name)
            if outcome.error != whole["error"] and not any(one in outcome.error for one in names):
                return f"names no file: {outcome.error}"
            return ""
        if outcome.code != whole["code"] and change != "seal":
            return f"exit code {outcome.code}: {outcome.err[-600:]}"
        if outcome.code not in (0, 1):
            return f"exit code {outcome.code}: {outcome.err[-600:]}"
        if self._must_be_whole(file, change):
            return self._difference(outcome, whole, home, file)
        return ""

    def _must_be_whole(self, file: Path, change: str) -> bool:
        """Return whether a command that accepts the file must have the same result as before."""
        return change != "seal" and is_sealed(self.sample.home / file)

    def _difference(self, outcome: Outcome, whole: dict[str, Any], home: Path, file: Path) -> str:
        found = contents(home, file)
        expected = {
            name: value
            for name, value in whole["contents"].items()
            if name != str(file) and file not in Path(name).parents
        }
        different = sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        )
        if different:
            return f"used: {different} differ; {outcome.err[-400:]}"
        return ""


def _shown_otherwise(outcome: Outcome, whole: dict[str, Any], home: Path, file: Path) -> str:
    if outcome.out != whole["out"]:
        return f"printed: {outcome.out[-600:]}"
    shown = pages(home, file)
    names = [name for name, page in whole["pages"].items() if shown.get(name, page) != page]
    return f"shown: {names}" if names else ""


def _draw_nothing(_: Figure, stream: Any, **__: Any) -> None:
    stream.write('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><title>x</title></svg>')


def _shortened(raised: str) -> str:
    """Return the end of a traceback with its locations only."""
    lines = [line.strip() for line in raised.splitlines() if not set(line) <= set(" ^~")]
    places = [line for line in lines if line.startswith("File ")][-7:]
    return "\n  ".join([*places, lines[-1][-500:]])


def is_sealed(path: Path) -> bool:
    """Return whether a file contains a checksum."""
    if path.suffix == ".json":
        value = json.loads(path.read_bytes())
        return isinstance(value, dict) and SEAL in value
    if path.suffix == ".ckpt":
        return zipfile.ZipFile(path).comment.startswith(b"powernorm sha256 ")
    return path.suffix == ".safetensors"
