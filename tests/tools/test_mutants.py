"""Mutants are small mistakes, and the report of those that tests notice is right."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("mutations")


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("mutants")


CHANGES = {
    "a < b": ["(a <= b)"],
    "a == b != c": ["(a != b != c)", "(a == b == c)"],
    "a is b": ["(a is not b)"],
    "a ** b @ c": ["(a * b) @ c"],
    "a % b": ["(a * b)"],
    "a and b and c": ["(a or b or c)"],
    "not a": ["(a)"],
    "-a": ["(a)"],
    "a if b else c": ["a if (not (b)) else c"],
    "[a for a in b if a]": ["[a for a in b if (not (a))]"],
    "f(a, b=c, d=e)": ["f(a, d=e)", "f(a, b=c, )", "pass"],
    "a.b.min(c)": ["a.b.max(c)", "pass"],
    "a[b:c]": ["a[:c]", "a[b:]"],
    "a = True": ["a = False"],
    "a = 2": ["a = (3)", "a = (1)"],
    "a = 0.5": ["a = (1.5)", "a = (-0.5)"],
    "a += b": ["a -= b", "pass"],
    "for a in b: break": ["for a in b: continue"],
    "def f(a=1): b": ["def f(a=(2)): b", "def f(a=(0)): b"],
    "def f(): return a": ["def f(): return None"],
    "if a: b()": ["if (not (a)): b()", "if a: pass"],
    "if a == 'ü': b": ["if (a != 'ü'): b"],
    "warnings.warn(f(1))": ["pass"],
}


@pytest.mark.parametrize("code", CHANGES)
def test_changes(mutations: ModuleType, code: str) -> None:
    found = [mutant.of(code) for mutant in mutations.candidates("a.py", code)]
    assert sorted(found) == sorted(CHANGES[code])


@pytest.mark.parametrize(
    "code",
    [
        "a: Literal[1, 2]",
        "def f(a: Tensor[1]) -> Tensor[2]:\n    'A docstring.'",
        "@overload\ndef f(a=1): return a",
        "@dataclass(frozen=True)\nclass A: pass",
        "raise ValueError(a + 1)",
        "assert a == 1",
        "a = f'{a + 1}'",
        "a = 'Part ' + b",
        "a = int | None",
        "if TYPE_CHECKING:\n    a = 1",
        "__all__ = [*('a', 'b')[1:]]",
        "for a in zip(b, c, strict=True): d",
        "_LOGGER.info('%d', 1)",
        "match a:\n    case 1: b",
        "return_nothing = None",
    ],
)
def test_left_alone(mutations: ModuleType, code: str) -> None:
    ast.parse(code)
    assert mutations.candidates("a.py", code) == []


def test_samples_are_the_same_and_compile(mutations: ModuleType) -> None:
    folder = ROOT / "src" / "powernorm" / "diagnosis"
    # Its names have nothing to change, so that other files would get its share.
    paths = (path for path in folder.glob("*.py") if path.name != "__init__.py")
    files = {path.name: path.read_text(encoding="utf-8") for path in paths}
    chosen = mutations.sample(files, 30, 0)
    assert chosen == mutations.sample(dict(reversed(files.items())), 30, 0)
    assert chosen != mutations.sample(files, 30, 1)
    assert len(set(chosen)) == 30
    for mutant in chosen:
        text = files[mutant.file]
        assert mutations.is_mutant(text, mutant.of(text))
        assert mutant.original in text
    # Long files have more.
    lines = {name: text.count("\n") for name, text in files.items()}
    counts = {name: sum(mutant.file == name for mutant in chosen) for name in files}
    for name in files:
        assert abs(counts[name] - 30 * lines[name] / sum(lines.values())) <= 1


SOURCE = "def clip(x, top=3):\n    return min(x, top)\n"
TESTS = "from pkg.ops.clips import clip\n\n\ndef test_clip():\n    assert clip(2) == 2\n"
OLD_TESTS = f"""{TESTS}

def test_top():
    assert clip(9) < 4


def test_of_something_that_left():
    from pkg.ops.clips import cut
"""
KILLED = {("min", "max"), ("return min(x, top)", "return None")}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "checkout"
    for name, text in {
        "src/pkg/__init__.py": "",
        "src/pkg/ops/clips.py": SOURCE,
        "tests/ops/test_clips.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-ra'\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    # Pytest starts faster without them.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return root


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "mutants.py", "ops", "--root", root, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_killed_survived_and_lost(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = run(checkout, "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    killed = {(row["original"], row["mutated"]) for row in rows if row["outcome"] == "killed"}
    assert killed == KILLED
    assert {row["test"] for row in rows} == {"tests/ops/test_clips.py::test_clip", ""}
    assert "ops: 2 of 4 mutants killed (50%), 0 of them by a timeout" in done.stdout
    assert "Survivors:\n    src/pkg/ops/clips.py:1  3 → (2)\n" in done.stdout
    assert (checkout / "src/pkg/ops/clips.py").read_text(encoding="utf-8") == SOURCE

    # Only what the tests of today leave alive meets the old ones, and today's are stored.
    old = tmp_path / "old"
    (old / "tests" / "ops").mkdir(parents=True)
    (old / "tests" / "ops" / "test_clips.py").write_text(OLD_TESTS, encoding="utf-8")
    (old / "pyproject.toml").write_text("", encoding="utf-8")
    done = run(checkout, "--out", str(out), "--compare", str(old))
    assert done.returncode == 1, done.stderr
    assert "left out: tests/ops/test_clips.py::test_of_something_that_left" in done.stdout
    lost = "    src/pkg/ops/clips.py:1  3 → (4)  killed by tests/ops/test_clips.py::test_top"
    assert f"1 kills are lost:\n{lost}\n" in done.stdout
    assert len(out.read_text(encoding="utf-8").splitlines()) == len(rows) + 2


def test_tests_that_fail_anyway_are_refused(checkout: Path) -> None:
    (checkout / "tests" / "ops" / "test_clips.py").write_text(OLD_TESTS, encoding="utf-8")
    done = run(checkout)
    assert done.returncode == 1
    failing = "tests/ops/test_clips.py::test_of_something_that_left"
    assert f"name them after --leave-out:\n    {failing}\n" in done.stderr
    done = run(checkout, "--leave-out", failing, "--minutes", "0")
    assert done.returncode == 0, done.stderr
    assert "4 were not run: the time was over" in done.stdout


@pytest.mark.parametrize(("busy", "waits"), [("while True: pass", 99), ("time.sleep(99)", 2)])
def test_an_endless_mutant_is_killed(
    checkout: Path, mutants: ModuleType, monkeypatch: pytest.MonkeyPatch, busy: str, waits: int
) -> None:
    """It uses up its processor time, or the time by the clock, in which others may run."""
    monkeypatch.setattr(mutants, "HANGING", waits)
    test = checkout / "tests" / "ops" / "test_clips.py"
    test.write_text(f"import time\n\ndef test_clip():\n    {busy}\n", encoding="utf-8")
    suite = mutants.Suite("now", checkout, ["tests/ops"])
    suite.limit = 1
    outcome = suite.run(list(suite.files))
    assert (outcome.code, outcome.failed) == (None, [])
    assert outcome.seconds < 5


def test_its_tests_end_with_it(checkout: Path) -> None:
    test = checkout / "tests" / "ops" / "test_clips.py"
    test.write_text(
        "import os, pathlib, time\n\ndef test_clip():\n"
        "    pathlib.Path('pid.part').write_text(str(os.getpid()))\n"
        f"    os.rename('pid.part', {str(checkout / 'pid')!r})\n    time.sleep(99)\n",
        encoding="utf-8",
    )
    command = [sys.executable, ROOT / "tools" / "mutants.py", "ops", "--root", checkout]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (checkout / "pid").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((checkout / "pid").read_text()), 0)


def test_tests_about_the_mutant_come_first(checkout: Path, mutants: ModuleType) -> None:
    for name in ("test_a.py", "test_z.py"):
        (checkout / "tests" / "ops" / name).write_text("", encoding="utf-8")
    suite = mutants.Suite("now", checkout, ["tests/ops"])
    (mutant, *_) = mutants.sample({"src/pkg/ops/clips.py": SOURCE}, 1, 0)
    assert suite.ordered(mutant)[0] == "tests/ops/test_clips.py"


def test_unknown_packages_are_refused(checkout: Path) -> None:
    command = [sys.executable, ROOT / "tools" / "mutants.py", "opps", "--root", checkout]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'opps' is no package" in done.stderr
