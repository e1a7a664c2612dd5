"""Check the private names of torch, transformers and onnx that src uses against a kept list.

    python tools/private_names.py            # compare with tools/private_names.toml
    python tools/private_names.py --print    # the names and the files that use them

A private name has a part with a leading underscore. The tool finds imports, attribute chains from
an imported module, names that `find` of ops/torch_private.py looks up, and private attributes of
objects that no class in src defines (written `._name`). The exit code is 1 where the list lacks a
use, has one that is gone, or an entry does not say why it is used and what happens without it. In
ops and norms only ops/torch_private.py may name a private part of a module, with a test.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

LIBRARIES: Final = ("torch", "transformers", "onnx")
OF_PYTHON: Final = {"_replace", "_asdict", "_make", "_fields", "_field_defaults"}
"""Attributes of named tuples."""
OF_TORCH: Final = {"_parameters", "_buffers", "_modules", "_scale", "_version"}
"""Attributes of torch's objects; those of src with these names count only in their own file."""
CORE: Final = ("src/powernorm/ops/", "src/powernorm/norms/")
LOOKUPS: Final = "src/powernorm/ops/torch_private.py"
NEEDED: Final = ("why", "fallback")


def is_private(name: str) -> bool:
    """Return whether a part of a dotted name has a leading underscore, and is no dunder."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def of_library(name: str) -> bool:
    """Return whether a dotted name is private and of a library."""
    return name.split(".")[0] in LIBRARIES and is_private(name)


def imported(tree: ast.AST) -> dict[str, str]:
    """Return the imports of a file: name in the file -> dotted name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def chain_of(node: ast.expr) -> list[str]:
    """Return the names of an attribute chain, [] for an attribute of an expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := chain_of(node.value)):
        return [*before, node.attr]
    return []


def is_super_call(node: ast.expr) -> bool:
    """Return whether an expression is `super()`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes that classes of a file define.

    A method that calls the same one of `super()` overrides another's.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    calls = (one for one in ast.walk(item) if isinstance(one, ast.Attribute))
                    if not any(one.attr == item.name and is_super_call(one.value) for one in calls):
                        yield item.name
                elif isinstance(item, ast.Assign | ast.AnnAssign):
                    targets = item.targets if isinstance(item, ast.Assign) else [item.target]
                    yield from (one.id for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if ast.unparse(node.value) in ("self", "cls") else ""


def looked_up(call: ast.Call) -> str:
    """Return the private name that `find` or `getattr` gets as a string, "" if none."""
    if not isinstance(call.func, ast.Name):
        return ""
    at, before = {"find": (0, "torch."), "getattr": (1, ".")}.get(
        call.func.id, (len(call.args), "")
    )
    given = call.args[at] if at < len(call.args) else None
    name = given.value if isinstance(given, ast.Constant) else ""
    if not isinstance(name, str) or not is_private(name):
        return ""
    return f"{before}{name}"


def uses_in(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield the private names that a file uses, those of objects with a leading dot."""
    modules = imported(tree)
    yield from (name for name in modules.values() if of_library(name))
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if of_library(alias.name))
        if isinstance(node, ast.Call) and (name := looked_up(node)) and name[1:] not in own:
            yield name
        if not isinstance(node, ast.Attribute) or node in inner:
            continue
        chain = chain_of(node)
        if chain:
            inner.update(ast.walk(node))
        if chain and chain[0] in modules:
            name = ".".join((modules[chain[0]], *chain[1:]))
            if of_library(name):
                yield name
            continue
        for part in chain[1:] or [node.attr]:
            if is_private(part) and part not in own | OF_PYTHON:
                yield f".{part}"


def uses(root: Path) -> dict[str, set[str]]:
    """Return the private names that src of a checkout uses, with the files that do."""
    trees = {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in [*root.glob("src/**/*.py"), *root.glob("packages/*/src/**/*.py")]
    }
    own = {name for tree in trees.values() for name in defined(tree)} - OF_TORCH
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file, tree in trees.items():
        names = set(uses_in(tree, own | set(defined(tree))))
        for name in names:
            if not any(other.startswith(f"{name}.") for other in names):
                found[name].add(file)
    return dict(found)


def complaints(
    found: Mapping[str, set[str]], kept: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the faults of the list and of uses."""
    for name in sorted(found.keys() | kept.keys()):
        files, entry = found.get(name, set()), kept.get(name, {})
        listed = set(entry.get("files", ()))
        if name not in kept:
            yield f"{name} is used in {', '.join(sorted(files))}: add it to the list, or avoid it"
            continue
        if not files:
            yield f"{name} is no longer used: take it out of the list"
            continue
        for file in sorted(files ^ listed):
            change = "uses it: add" if file in files else "does not use it: delete"
            yield f"{name}: {file} {change} the file"
        yield from (f"{name}: the list says no {key!r}" for key in NEEDED if not entry.get(key))
        core = sorted(file for file in files if file.startswith(CORE))
        if core and not name.startswith("."):
            for file in core:
                if file != LOOKUPS:
                    yield f"{name}: {file} uses it: look it up in {LOOKUPS}, with a fallback"
            if not entry.get("test"):
                yield f"{name}: the list names no 'test' of its fallback"


def main() -> int:
    """Print all faults; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--print", action="store_true", dest="shows")
    arguments = parser.parse_args()
    found = uses(arguments.root)
    if arguments.shows:
        for name, files in sorted(found.items()):
            print(f"{name}: {', '.join(sorted(files))}")
        return 0
    path = arguments.root / "tools" / "private_names.toml"
    wrong = list(complaints(found, tomllib.loads(path.read_text(encoding="utf-8"))))
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print(f"{path.name}: {len(wrong)} to correct", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
