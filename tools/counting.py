"""Counts of tools/budget.py, by syntax alone: nothing is imported.

- **lines** of Python files with their docstrings, comments and blank lines, one entry a directory;
- **modules with one importer**: source files, `__init__.py` and `__main__.py` aside, that exactly
  one other source file imports. `from package import name` imports the submodule of that name where
  there is one, else the package. Imports in functions and under `TYPE_CHECKING` count;
- **repeated class names**: definitions of classes at the top of source files beyond the first of
  the same name. A third `Task` counts, too;
- **files in import circles**: source files whose imports lead back to them. Imports in functions
  count, since they only hide a circle. Imports under `TYPE_CHECKING` do not;
- **long files**: those of more than 500 lines;
- **refused words** by occurrence: in comments and docstrings, in Markdown pages and their tables,
  and docstrings that begin with a refused word;
- **words: docs**, those of the Markdown pages in docs, without the reference and the tables in CSV
  files;
- the shares of **comment lines** and of **repeated lines**, which are equal to others with their
  neighbors, six in a row. Blank lines and comments are left out.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

FOLDERS: Final = ("src", "packages", "tests", "benchmarks", "studies", "examples", "tools", "docs")
SKIPPED: Final = re.compile(r"(^|/)(\.[^/]*|__pycache__|build|[^/]*\.egg-info)/")
SOURCE: Final = re.compile(r"(packages/[^/]+/)?src/.*\.py")
TESTS: Final = re.compile(r"(packages/[^/]+/)?tests/.*\.py")
PAGE: Final = re.compile(r"docs/(?!api/).*\.md")
LONG: Final = 500
WINDOW: Final = 6
"""Lines in a row that must be equal to count as repeated."""

# `stands for` is correct where it explains an abbreviation.
REFUSED: Final = {
    "mend": r"mend(?:s|ed|ing)?",
    "anew": r"anew",
    "shall": r"shall",
    "whoever": r"whoever",
    "one's own": r"one's\s+own",
    "user's own": r"user's\s+own",
    "stands": r"stands?(?!-|\s+(?:for|in|out)\b)",
    "go on": r"(?:go|goes|going|went|gone)\s+on",
}
_REFUSED: Final = re.compile(rf"\b(?:{'|'.join(f'({p})' for p in REFUSED.values())})\b", re.I)
_FIRST_WORD: Final = re.compile(r"\s*(Of|What|Who|Those|That)\b")

# The strings are matched because a `#` in them begins no comment.
_TOKENS: Final = re.compile(
    r'(?P<comment>#[^\n]*)|"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'',
    re.S,
)

Tree = Mapping[str, str]
"""The text of each file by its path from the root of the repository."""
Trees = Mapping[str, Sequence[tuple[ast.stmt, bool]]]
"""The statements of each Python file, nested ones included; whether TYPE_CHECKING guards them."""


class Count(NamedTuple):
    """A number, and the places of each offender that adds to it."""

    value: int
    offenders: Mapping[str, Sequence[str]] = {}


Counts = Mapping[str, Mapping[str, Count]]
"""The counts by section (`lines`, `counts`) and name."""


def read_folder(root: Path) -> dict[str, str]:
    """Read the Python files and Markdown pages of a checkout, and the tables of its docs."""
    found = [*root.glob("*.*"), *(p for folder in FOLDERS for p in (root / folder).rglob("*.*"))]
    paths = {path.relative_to(root).as_posix(): path for path in found}
    return {name: p.read_text(encoding="utf-8") for name, p in paths.items() if _is_read(name)}


def read_commit(root: Path, commit: str) -> dict[str, str]:
    """Read the same files of a commit."""
    command = ["git", "-C", str(root), "archive", commit]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{commit!r} cannot be read: {done.stderr.decode().strip()}")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            content = archive.extractfile(member) if _is_read(member.name) else None
            if content is not None:
                files[member.name] = content.read().decode("utf-8")
    return files


def _is_read(name: str) -> bool:
    known = "/" not in name or name.partition("/")[0] in FOLDERS
    suffixes = (".py", ".md", ".csv") if name.startswith("docs/") else (".py", ".md")
    return known and name.endswith(suffixes) and not SKIPPED.search(name)


def entry(name: str) -> str:
    """Return the entry of the budget that a Python file belongs to.

    It is named after the directory below the package (`src/ops`, `packages/lab/engine`) or below
    tests. `top` has the files beside.
    """
    match list(PurePosixPath(name).parts[:-1]):
        case ["packages", package, "src", _, *rest] | ["packages", package, *rest]:
            return "/".join(["packages", package, *(rest[:1] or ["top"])])
        case ["src", _, *rest] | ["tests", *rest]:
            return "/".join([name.partition("/")[0], *(rest[:1] or ["top"])])
        case [folder, *_]:
            return folder
    return "top"


def count(files: Tree) -> Counts:
    """Count lines by directory, and everything else."""
    lines: Counter[str] = Counter()
    for name, text in files.items():
        if name.endswith(".py"):
            lines[entry(name)] += text.count("\n")
    trees = {n: list(_statements(ast.parse(t, n))) for n, t in files.items() if n.endswith(".py")}
    source = {name: tree for name, tree in trees.items() if SOURCE.match(name)}
    words = _words(files, trees)
    return {
        "lines": {name: Count(lines[name]) for name in sorted(lines)},
        "counts": {
            "modules with one importer": _one_importer(source),
            "repeated class names": _repeated_classes(source),
            "files in import circles": _circles(source),
            "long files: source": _long(files, source),
            "long files: tests": _long(files, filter(TESTS.match, trees)),
            "refused words: code": _sum(words["code"]),
            "refused words: pages": _sum(words["pages"]),
            "refused first words": _sum(words["first"]),
            "words: docs": Count(
                sum(len(files[name].split()) for name in filter(PAGE.match, files))
            ),
        },
    }


def _words(files: Tree, trees: Trees) -> dict[str, dict[str, list[str]]]:
    """Find refused words in code and pages, and those that docstrings begin with, by file."""
    words: dict[str, dict[str, list[str]]] = {"code": {}, "pages": {}, "first": {}}
    for name, text in files.items():
        docstrings = list(_docstrings(trees.get(name, [])))
        area, texts = "pages", [(1, text)]
        if name in trees:
            area, texts = "code", [*docstrings, *_comments(text)]
        for line, part in texts:
            for match in _REFUSED.finditer(part):
                word = list(REFUSED)[(match.lastindex or 0) - 1]
                place = f"line {line + part.count(chr(10), 0, match.start())}"
                words[area].setdefault(f"{name}: {word!r}", []).append(place)
        for line, part in docstrings:
            if (first := _FIRST_WORD.match(part)) is not None:
                words["first"].setdefault(f"{name}: {first[1]!r}", []).append(f"line {line}")
    return words


def _sum(offenders: Mapping[str, Sequence[str]]) -> Count:
    return Count(sum(map(len, offenders.values())), offenders)


def _long(files: Tree, names: Iterable[str]) -> Count:
    lines = {name: files[name].count("\n") for name in sorted(names)}
    return _sum({name: [f"{n} lines"] for name, n in lines.items() if n > LONG})


def _statements(node: ast.AST, guarded: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        test = getattr(node, "test", None)
        inside = guarded or (field == "body" and test and "TYPE_CHECKING" in ast.unparse(test))
        for child in getattr(node, field, []) if not isinstance(node, ast.expr) else []:
            if isinstance(child, ast.stmt):
                yield child, bool(inside)
            yield from _statements(child, bool(inside))


def _docstrings(tree: Sequence[tuple[ast.stmt, bool]]) -> Iterator[tuple[int, str]]:
    """Yield docstrings, those of attributes too, with their lines."""
    for node, _ in tree:
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node.lineno, value.value


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments with their first lines; comments in a row are one text."""
    block, line, last, position = "", 1, 0, 0
    for match in filter(lambda found: found["comment"], _TOKENS.finditer(text)):
        line += text.count("\n", position, match.start())
        position = match.start()
        if block and line > last + 1:
            yield last - block.count("\n"), block
            block = ""
        block += ("\n" if block else "") + match["comment"].replace("#", " ")
        last = line
    if block:
        yield last - block.count("\n"), block


def _imports(source: Trees, *, types: bool) -> dict[str, set[str]]:
    """Return the source files that each imports; `types`: also those under TYPE_CHECKING."""
    modules = {}
    for name in source:
        parts = PurePosixPath(name).with_suffix("").parts
        parts = parts[parts.index("src") + 1 :]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = name
    graph: dict[str, set[str]] = {name: set() for name in source}
    for module, name in modules.items():
        package = module.split(".") + [""] * name.endswith("/__init__.py")
        for node, guarded in source[name]:
            wanted = []
            if isinstance(node, ast.Import) and (types or not guarded):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (types or not guarded):
                above = package[: -node.level] if node.level else []
                base = ".".join([*above, node.module] if node.module else above)
                full = [f"{base}.{alias.name}" for alias in node.names]
                wanted = [each if each in modules else base for each in full]
            graph[name] |= {modules[each] for each in wanted if each in modules} - {name}
    return graph


def _one_importer(source: Trees) -> Count:
    importers: dict[str, list[str]] = defaultdict(list)
    for name, imported in sorted(_imports(source, types=True).items()):
        for each in imported:
            if not each.endswith(("/__init__.py", "/__main__.py")):
                importers[each].append(f"imported by {name} only")
    return _sum({name: found for name, found in sorted(importers.items()) if len(found) == 1})


def _repeated_classes(source: Trees) -> Count:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in sorted(source.items()):
        for node, _ in tree:
            if isinstance(node, ast.ClassDef) and not node.col_offset:
                places[node.name].append(f"{name}:{node.lineno}")
    repeated = {name: found for name, found in sorted(places.items()) if len(found) > 1}
    return Count(sum(len(found) - 1 for found in repeated.values()), repeated)


def _circles(source: Trees) -> Count:
    graph = _imports(source, types=False)
    reached = {name: set(imported) for name, imported in graph.items()}
    for middle in graph:
        for found in reached.values():
            found |= reached[middle] if middle in found else set()
    circles = {}
    for name in sorted(n for n in graph if n in reached[n]):
        back = [each for each in sorted(graph[name]) if name in reached[each]]
        circles[name] = ["imports " + ", ".join(back)]
    return _sum(circles)


def shares(files: Tree) -> dict[str, float]:
    """Return the percentages of comment lines and of repeated lines, of source and tests."""
    return {
        **_shares("source", [text for name, text in files.items() if SOURCE.match(name)]),
        **_shares("tests", [text for name, text in files.items() if TESTS.match(name)]),
    }


def _shares(area: str, contents: Sequence[str]) -> dict[str, float]:
    texts = [[line.strip() for line in content.splitlines()] for content in contents]
    codes = [[line for line in text if line and line[0] != "#"] for text in texts]
    lines, comments = sum(map(len, texts)), sum(line[:1] == "#" for t in texts for line in t)
    windows = Counter(window for code in codes for window in _windows(code))
    repeated = 0
    for code in codes:
        starts = [start for start, window in enumerate(_windows(code)) if windows[window] > 1]
        repeated += len({line for start in starts for line in range(start, start + WINDOW)})
    return {
        f"% comment lines: {area}": 100 * comments / max(lines, 1),
        f"% repeated lines: {area}": 100 * repeated / max(sum(map(len, codes)), 1),
    }


def _windows(code: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(code[start:] for start in range(WINDOW)), strict=False)
