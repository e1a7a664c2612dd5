"""Measure the killing power of a package's tests: how many small mistakes they notice.

    python tools/mutants.py diagnosis --out build/mutants.jsonl
    python tools/mutants.py engine --tests packages/lab/tests/engine
    python tools/mutants.py norms --compare HEAD~3

It makes seeded mutants of the package (tools/mutations.py), writes each into a copy of the checkout
and runs the package's tests there until one fails. A failure, or three times the processor time
without a mutant, kills the mutant. A survivor is a mistake that no test notices, or a change that
has no effect.

With `--compare` the mutants that survive today's tests meet the tests of a commit or of another
checkout, too, on the same source: a kill that only the old tests make is lost, and the exit code
is 1. Old tests that fail on today's source without a mutant are left out.

With `--out` the outcomes are stored as JSON lines, and the same command continues where it was
stopped. An outcome counts as long as the mutated file and the tests are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from mutations import Mutant, sample

LEFT_BEHIND: Final = shutil.ignore_patterns(
    ".git", ".venv", ".hypothesis", ".*_cache", "build", "dist", "runs", "site"
)
SLOWER: Final = 3
"""Maximum processor time of a mutant, as a multiple of that without one."""
GRACE: Final = 10
"""Additional seconds that it may take."""
HANGING: Final = 10
"""Maximum time by the clock, as a multiple of the processor time: other programs may run, too."""


class Outcome(NamedTuple):
    """How a run of tests ended."""

    code: int | None
    """Pytest's exit code, or None after a timeout."""
    failed: list[str]
    """Failed tests, and files that could not be collected."""
    seconds: float
    """Processor time of pytest and of the processes that it waited for."""


def processor_time() -> float:
    """Return the processor seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Suite:
    """The tests of a package in a copy of the checkout.

    Args:
        name: name in the results.
        root: folder of the copy.
        paths: paths of tests, relative to the root.
    """

    def __init__(self, name: str, root: Path, paths: Sequence[str]) -> None:
        self.name = name
        self.root = root
        if missing := [path for path in paths if not (root / path).exists()]:
            sys.exit(f"{name}: {missing[0]} does not exist. Name tests with --tests or --old-tests")
        self.files: dict[str, str] = {}
        for path in (root / each for each in paths):
            found = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            self.files |= {p.relative_to(root).as_posix(): p.read_text("utf-8") for p in found}
        everything = sorted(p for each in root.glob("**/tests") for p in each.rglob("*.py"))
        content = b"".join(path.read_bytes() for path in everything)
        self.digest = hashlib.sha256(content + repr(sorted(self.files)).encode()).hexdigest()
        self.left_out: Sequence[str] = ()
        self.limit: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Python imports the copy, not the installed package."""
        source = [*self.root.glob("src"), *self.root.glob("packages/*/src")]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, source))}
        variables.pop("POWERNORM_TEST_HOME", None)
        return variables | {"PYTHONHASHSEED": "0"}

    def run(self, files: Sequence[str], *options: str) -> Outcome:
        """Run test files in this order."""
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        begin = processor_time()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [
                    *command,
                    "-rfE",
                    *options,
                    *(f"--deselect={test}" for test in self.left_out),
                    *files,
                ],
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._limit_processor_time,
            )
            try:
                code: int | None = process.wait(self.limit and HANGING * self.limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Tests start processes, which a mutant may leave behind.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", text, re.M)
        if code == -signal.SIGXCPU:
            code = None
        if code not in (None, 0, 1) and not failed:
            failed = [text.strip().splitlines()[-1] if text.strip() else f"exit code {code}"]
        return Outcome(code, failed, processor_time() - begin)

    def _limit_processor_time(self) -> None:
        if self.limit is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (self.limit, self.limit + GRACE))

    def check(self, package: str, *, strict: bool) -> None:
        """Run all tests without a mutant, for the time that they take.

        Args:
            package: name of the package, which has to be imported from the copy.
            strict: exit if a test fails; else leave it out.
        """
        program = f"import {package}; print({package}.__file__)"
        found = subprocess.check_output(
            [sys.executable, "-c", program], cwd=self.root, env=self.environment, text=True
        )
        if not Path(found.strip()).is_relative_to(self.root):
            sys.exit(f"{package} is imported from {found.strip()}, not from the copy {self.root}")
        outcome = self.run(list(self.files), "--continue-on-collection-errors")
        if outcome.failed and strict:
            failed = "\n    ".join(outcome.failed)
            sys.exit(
                f"{self.name}: tests fail without a mutant. Fix them, or name them after "
                f"--leave-out:\n    {failed}"
            )
        self.files = {name: t for name, t in self.files.items() if name not in outcome.failed}
        self.left_out = [*self.left_out, *(test for test in outcome.failed if "::" in test)]
        self.limit = SLOWER * round(outcome.seconds) + GRACE
        left = f"; left out: {', '.join(outcome.failed)}" if outcome.failed else ""
        print(f"{self.name}: {len(self.files)} files, {outcome.seconds:.0f} s{left}", flush=True)

    def meet(self, mutant: Mutant, mutated: str, number: int) -> dict[str, Any]:
        """Run the tests on a mutant until one fails."""
        path = self.root / mutant.file
        content, times = path.read_bytes(), path.stat().st_mtime_ns
        path.write_text(mutated, encoding="utf-8")
        # Stored bytecode is compared by size and whole seconds: no two mutants have the same.
        os.utime(path, ns=(times, times + number * 10**9))
        try:
            outcome = self.run(self.ordered(mutant), "-x")
        finally:
            path.write_bytes(content)
            os.utime(path, ns=(times, times))
        if outcome.code == 5:
            sys.exit(f"{self.name}: no tests were run")
        how = "timeout" if outcome.code is None else "killed" if outcome.code else "survived"
        test = outcome.failed[0] if outcome.failed else ""
        return {"outcome": how, "test": test, "seconds": round(outcome.seconds, 1)}

    def ordered(self, mutant: Mutant) -> list[str]:
        """Return the test files, first those about the changed function and module."""
        module = Path(mutant.file).with_suffix("").name
        names = re.compile(rf"\b(?:{'|'.join([module, *mutant.scope.split('.')])})\b")
        score = {
            file: 100 * (module in file) + len(names.findall(text))
            for file, text in self.files.items()
        }
        return sorted(self.files, key=lambda file: (-score[file], file))


def package_files(root: Path, package: str) -> dict[str, str]:
    """Read a package, or a module, of the source: `norms`, `engine`, `errors`."""
    for folder in [*root.glob("src/*"), *root.glob("packages/*/src/*")]:
        paths = [*(folder / package).rglob("*.py"), *folder.glob(f"{package}.py")]
        texts = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths}
        # Device code runs only on a GPU.
        texts = {name: text for name, text in texts.items() if "@triton.jit" not in text}
        if texts:
            return texts
    sys.exit(f"{package!r} is no package of {root / 'src'}: try `norms` or `engine`")


def tests_of(file: str, package: str) -> list[str]:
    """Return where the tests of a package are."""
    parts = PurePosixPath(file).parts
    return [str(PurePosixPath(*parts[: parts.index("src")], "tests", package))]


def copy_with_tests(root: Path, source: str, target: Path) -> None:
    """Copy a checkout, with the tests and pyproject.toml of a commit or of another checkout."""
    shutil.copytree(root, target, ignore=LEFT_BEHIND, symlinks=True)
    with tempfile.TemporaryDirectory() as folder:
        old = Path(source)
        if not old.is_dir():
            old = Path(folder)
            archive = old / "archive.tar"
            command = ["git", "-C", str(root), "archive", "--output", str(archive), source]
            if subprocess.run(command, check=False).returncode:
                sys.exit(f"--compare {source}: expected a commit or a folder")
            with tarfile.open(archive) as opened:
                opened.extractall(old, filter="data")
        for tests in [target / "tests", *target.glob("packages/*/tests")]:
            shutil.rmtree(tests)
        for tests in [old / "tests", *old.glob("packages/*/tests")]:
            shutil.copytree(tests, target / tests.relative_to(old), ignore=LEFT_BEHIND)
        (target / "conftest.py").unlink(missing_ok=True)
        for settings in old.glob("conftest.py"):  # of older commits it is among the tests
            shutil.copy2(settings, target)
        shutil.copy2(old / "pyproject.toml", target)


class Results:
    """Outcomes by suite and mutant, kept in a JSON lines file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text("utf-8").splitlines() if path and path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}

    def get(self, suite: Suite, mutant: Mutant, text: str, number: int) -> dict[str, Any]:
        """Return the stored outcome, or find and store it."""
        mutated = mutant.of(text)
        key = hashlib.sha256(f"{suite.digest} {mutant.file} {mutated}".encode()).hexdigest()[:16]
        if key not in self.rows:
            found = suite.meet(mutant, mutated, number)
            self.rows[key] = {"key": key, "suite": suite.name, **mutant._asdict(), **found}
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(self.rows[key], ensure_ascii=False) + "\n")
        return self.rows[key]


def report(package: str, rows: Sequence[tuple[Mutant, Mapping[str, Any], str]], count: int) -> str:
    """Return the summary: kills, survivors and lost kills.

    Args:
        package: package of the mutants.
        rows: a mutant, its outcome today, and the old test that kills it if none does today.
        count: number of mutants to run.
    """
    killed = [row for _, row, _ in rows if row["outcome"] != "survived"]
    over = sum(row["outcome"] == "timeout" for row in killed)
    survivors = [f"    {mutant}" for mutant, row, _ in rows if row["outcome"] == "survived"]
    lost = [f"    {mutant}  killed by {test}" for mutant, _, test in rows if test]
    lines = [
        f"{package}: {len(killed)} of {len(rows)} mutants killed "
        f"({len(killed) / max(len(rows), 1):.0%}), {over} of them by a timeout",
        f"{count - len(rows)} were not run: the time was over" if len(rows) < count else "",
        "Survivors:" if survivors else "",
        *survivors,
        f"{len(lost)} kills are lost:" if lost else "",
        *lost,
    ]
    return "\n".join(filter(None, lines))


def main() -> None:
    """Run the mutants and print their outcomes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("package", help="below the package of src or of packages/*/src: norms, engine")
    add("--count", type=int, default=60, help="mutants (60)")
    add("--seed", type=int, default=0)
    add("--tests", nargs="+", metavar="PATH", help="tests/PACKAGE by default")
    add("--leave-out", nargs="+", metavar="TEST", default=[], help="tests that are not run")
    add("--minutes", type=float, default=60.0, help="start no mutant after them (60)")
    add("--out", type=Path, metavar="FILE", help="JSON lines that are added to and continued")
    add("--compare", metavar="COMMIT", help="a commit or a checkout with the tests before")
    add("--old-tests", nargs="+", metavar="PATH", help="of --compare, where they were elsewhere")
    add("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    options = parser.parse_args()
    # Its tests end with it, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()
    root = options.root.resolve()
    files = package_files(root, options.package)
    chosen = sample(files, options.count, options.seed)
    paths = options.tests or tests_of(next(iter(files)), options.package)
    results = Results(options.out)
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name).resolve()
        shutil.copytree(root, folder / "now", ignore=LEFT_BEHIND, symlinks=True)
        suites = [Suite("now", folder / "now", paths)]
        suites[0].left_out = options.leave_out
        if options.compare:
            copy_with_tests(root, options.compare, folder / "old")
            suites += [Suite(options.compare, folder / "old", options.old_tests or paths)]
        package = PurePosixPath(next(iter(files)).partition("src/")[2]).parts[0]
        for suite in suites:
            suite.check(package, strict=suite is suites[0])
        for number, mutant in enumerate(chosen, 1):
            if time.monotonic() - begin > 60 * options.minutes:
                break
            row = results.get(suites[0], mutant, files[mutant.file], number)
            print(f"{number:3} {row['outcome']:8} {mutant}  {row['test']}", flush=True)
            test = ""
            if row["outcome"] == "survived" and options.compare:
                old = results.get(suites[1], mutant, files[mutant.file], number)
                test = "" if old["outcome"] == "survived" else old["test"] or old["outcome"]
            rows.append((mutant, row, test))
    print("\n" + report(options.package, rows, len(chosen)))
    sys.exit(any(test for _, _, test in rows))


if __name__ == "__main__":
    main()
