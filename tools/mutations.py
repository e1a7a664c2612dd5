"""Mutants of Python files: small changes of the syntax that a test should notice.

Comparisons and arithmetic operators are exchanged, `and` and `or`, `min` and `max`, `any` and
`all`, `break` and `continue`; `not` and signs are dropped, numbers and flags changed, defaults
among them; conditions are negated; keywords, bounds of slices, calls and updates removed; functions
return None. Excluded is code that no test can or should notice: annotations, docstrings,
decorators, assertions, errors and their messages, f-strings, `TYPE_CHECKING`, overloads and
Triton's device code.
"""

from __future__ import annotations

import ast
import random
import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, zip_longest
from typing import Any, Final, NamedTuple

COMPARISONS: Final[Mapping[type, type]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SHOWN: Final = 80
"""Characters of a change that are printed."""
_ORDERS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# `|` is left out: it is mostly between types.
ARITHMETIC: Final[Mapping[type, type]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
}  # fmt: skip
NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Their values have no effect, or none that a test sees.
KEYWORDS: Final = ("strict", "encoding", "stacklevel")
SKIPPED_FIELDS: Final = (
    "annotation",
    "returns",
    "decorator_list",
    "pattern",
    "bases",
    "type_params",
)
_SKIPPED_CALLS: Final = re.compile(
    r"(warnings\.warn|TypeVar|NewType|cast|(\w+\.)*_?log(ger|ging)?\.\w+)$", re.I
)


class Mutant(NamedTuple):
    """A change of the bytes from `start` to `end` of a file."""

    file: str
    line: int
    kind: str
    scope: str
    """The dotted name of the class or function around it."""
    start: int
    end: int
    original: str
    mutated: str

    def of(self, text: str) -> str:
        """Return the mutated file."""
        data = text.encode()
        return (data[: self.start] + self.mutated.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        original, mutated = (
            text if len(text := " ".join(each.split())) <= SHOWN else f"{text[:SHOWN]}…"
            for each in (self.original, self.mutated)
        )
        return f"{self.file}:{self.line}  {original} → {mutated or '(removed)'}"


Change = tuple[str, Any, str]
"""A kind of mutation, the node or the (start, end) in bytes that it replaces, and the new text."""


def candidates(file: str, text: str) -> list[Mutant]:
    """Return the mutants of a file in the order of its lines; a few do not compile."""
    tree = ast.parse(text)
    data = text.encode()
    starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]

    def span(node: Any) -> tuple[int, int]:
        begin, end = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    found = []
    for node, scope in _walk(tree, ""):
        for kind, place, new in _changes(node):
            start, end = span(place)
            if kind == "keyword":  # with the comma that follows
                end += len(re.match(rb"\s*,?[ \t]*", data[end:])[0])  # type: ignore[index]
            elif kind == "name":
                start = end - len(place.attr if isinstance(place, ast.Attribute) else place.id)
            original = data[start:end].decode()
            found.append(Mutant(file, place.lineno, kind, scope, start, end, original, new))
    return sorted(set(found))


def is_mutant(text: str, mutated: str) -> bool:
    """Return whether a mutated file compiles and means something else."""
    try:
        tree = ast.parse(mutated)
        compile(tree, "mutant", "exec")
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(text))


def _walk(node: ast.AST, scope: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the nodes that may change, each with the name of its scope."""
    if _is_skipped(node):
        return
    yield node, scope
    inner = scope
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        inner = f"{scope}.{node.name}".lstrip(".")
    for field, value in ast.iter_fields(node):
        if field not in SKIPPED_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child, inner)


def _is_skipped(node: ast.AST) -> bool:
    match node:
        case (
            ast.If(test=ast.Name(id="TYPE_CHECKING"))
            | ast.Raise()
            | ast.Assert()
            | ast.JoinedStr()
            | ast.Expr(value=ast.Constant())
        ):
            return True
        case ast.FunctionDef(decorator_list=decorators):
            return any(re.search(r"\b(jit|overload)\b", ast.unparse(each)) for each in decorators)
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name in ("__all__", "__slots__")
        case ast.Subscript(value=ast.Name(id="Literal")):
            return True
        case ast.keyword(arg=name):
            return name in KEYWORDS
        case ast.Call(func=function):
            return _SKIPPED_CALLS.match(ast.unparse(function)) is not None
    return False


def _changes(node: ast.AST) -> Iterator[Change]:
    for change in _CHANGES.get(type(node), ()):
        yield from change(node)


def _compare(node: ast.Compare) -> Iterator[Change]:
    for index, operator in enumerate(node.ops):
        if (new := COMPARISONS.get(type(operator))) is not None:
            operators = [*node.ops[:index], new(), *node.ops[index + 1 :]]
            changed = ast.Compare(node.left, operators, node.comparators)
            yield "comparison", node, f"({ast.unparse(changed)})"


def _arithmetic(node: ast.BinOp) -> Iterator[Change]:
    sides = (node.left, node.right)
    text = any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in sides)
    if (new := ARITHMETIC.get(type(node.op))) is not None and not text:
        yield "arithmetic", node, f"({ast.unparse(ast.BinOp(node.left, new(), node.right))})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _boolean(node: ast.BoolOp) -> Iterator[Change]:
    new = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "boolean", node, f"({ast.unparse(ast.BoolOp(new, node.values))})"


def _unary(node: ast.UnaryOp) -> Iterator[Change]:
    if isinstance(node.op, ast.Not | ast.USub):
        yield "unary", node, f"({ast.unparse(node.operand)})"


def _constant(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield "flag", node, str(not node.value)
    elif isinstance(node.value, int | float):
        yield "number", node, f"({node.value + 1})"
        yield "number", node, f"({node.value - 1})"


def _condition(node: ast.If | ast.IfExp) -> Iterator[Change]:
    yield from _negated(node.test)


def _filter(node: ast.comprehension) -> Iterator[Change]:
    for test in node.ifs:
        yield from _negated(test)


def _negated(test: ast.expr) -> Iterator[Change]:
    # The negation of `not` or of `==` is a mutant already.
    if not isinstance(test, ast.UnaryOp | ast.Compare) or (
        isinstance(test, ast.Compare) and isinstance(test.ops[0], _ORDERS)
    ):
        yield "condition", test, f"(not ({ast.unparse(test)}))"


def _call(node: ast.Call) -> Iterator[Change]:
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in KEYWORDS:
            yield "keyword", keyword, ""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in NAMES:
        yield "name", node.func, NAMES[name]


def _slice(node: ast.Slice) -> Iterator[Change]:
    if node.lower is not None:
        yield "slice", node, ast.unparse(ast.Slice(None, node.upper, node.step))
    if node.upper is not None:
        yield "slice", node, ast.unparse(ast.Slice(node.lower, None, node.step))


def _return(node: ast.Return) -> Iterator[Change]:
    if node.value is not None and not (
        isinstance(node.value, ast.Constant) and node.value.value is None
    ):
        yield "return", node, "return None"


def _statement(node: ast.Expr) -> Iterator[Change]:
    value = node.value.value if isinstance(node.value, ast.Await) else node.value
    if isinstance(value, ast.Call):
        function = ast.unparse(value.func)
        if function == "warnings.warn" or not _SKIPPED_CALLS.match(function):
            yield "statement", node, "pass"


def _update(node: ast.AugAssign) -> Iterator[Change]:
    yield "statement", node, "pass"
    if (new := ARITHMETIC.get(type(node.op))) is not None:
        yield "arithmetic", node, ast.unparse(ast.AugAssign(node.target, new(), node.value))


def _jump(node: ast.Break | ast.Continue) -> Iterator[Change]:
    yield "jump", node, "continue" if isinstance(node, ast.Break) else "break"


_CHANGES: Final[Mapping[type, Sequence[Any]]] = {
    ast.Compare: [_compare], ast.BinOp: [_arithmetic], ast.BoolOp: [_boolean],
    ast.UnaryOp: [_unary], ast.Constant: [_constant], ast.If: [_condition],
    ast.IfExp: [_condition], ast.comprehension: [_filter], ast.Call: [_call],
    ast.Slice: [_slice], ast.Return: [_return], ast.Expr: [_statement],
    ast.AugAssign: [_update], ast.Break: [_jump], ast.Continue: [_jump],
}  # fmt: skip


def sample(files: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """Choose mutants of files: more of longer files, and of each file different kinds."""
    rest = {file: _shuffled(file, text, seed) for file, text in sorted(files.items())}
    # Points at equal distances on the lines of all files in a row.
    ends = list(accumulate(files[file].count("\n") for file in rest))
    step = ends[-1] / count
    offset = random.Random(f"{seed}").random() * step
    names = list(rest)
    drawn = [names[bisect(ends, offset + step * index)] for index in range(count)]
    chosen = [mutant for file in drawn for mutant in islice(rest[file], 1)]
    # Files with little code have too few, and others more.
    others = (mutant for file in names for mutant in rest[file])
    return sorted([*chosen, *islice(others, count - len(chosen))])


def _shuffled(file: str, text: str, seed: int) -> Iterator[Mutant]:
    """Yield the mutants of a file at random, the kinds in turns."""
    chance = random.Random(f"{seed} {file}")
    found = candidates(file, text)
    chance.shuffle(found)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in found:
        kinds.setdefault(mutant.kind, []).append(mutant)
    for turn in zip_longest(*kinds.values()):
        yield from (each for each in turn if each and is_mutant(text, each.of(text)))
