import pytest
from hypothesis import given
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm_lab.tasks.classify.readers import parse_tree

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="()\\"), min_size=1).filter(
    lambda word: word.split() == [word] and word not in ("-LRB-", "-RRB-")
)
LEAVES = st.tuples(st.integers(0, 4), WORDS)
TREES = st.recursive(LEAVES, lambda inner: st.tuples(st.integers(0, 4), inner, inner))


def written(tree: tuple) -> str:  # type: ignore[type-arg]
    return f"({' '.join(part if isinstance(part, str) else inner(part) for part in tree)})"


def inner(part: object) -> str:
    return str(part) if isinstance(part, int) else written(part)  # type: ignore[arg-type]


def leaves(tree: tuple) -> list[str]:  # type: ignore[type-arg]
    if isinstance(tree[1], str):
        return [tree[1]]
    return [word for part in tree[1:] for word in leaves(part)]


@given(TREES)
def test_any_tree_gives_its_class_and_its_words(tree: tuple) -> None:  # type: ignore[type-arg]
    assert parse_tree(written(tree), "x") == (str(tree[0]), leaves(tree))


@pytest.mark.parametrize(
    ("line", "column", "expected"),
    [
        ("3 good", 1, "a tree in brackets"),
        ("(5 good)", 2, "a class from 0 to 4"),
        ("((2 a) (2 b))", 2, "a class from 0 to 4"),
        ("(3)", 3, "a class, then a word"),
        ("()", 2, "a class, then a word"),
        ("(3 (2 a) (2))", 12, "a class, then a word"),
        ("(3 a", 5, "a closing bracket"),
        ("(3 a))", 6, "nothing after it"),
        ("(3 a) (2 b)", 7, "nothing after it"),
        ("(" * 5000, 2, "a class from 0 to 4"),
        ("(3 " * 5000, 15001, "a closing bracket"),
    ],
)
def test_what_is_no_tree_is_refused_with_its_column(line: str, column: int, expected: str) -> None:
    with pytest.raises(InputError, match=f"here, column {column}: .*{expected}"):
        parse_tree(line, "here")
