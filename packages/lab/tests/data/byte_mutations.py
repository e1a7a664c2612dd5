"""Damaged files: bytes changed, removed, doubled or inserted, mostly near the structure."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def mutated(draw: st.DrawFn, content: bytes, near: int = 120) -> bytes:
    """Draw one to three changes, half of them within `near` bytes of the beginning or end."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        length = len(changed)
        edge = min(near, length)
        anywhere = st.integers(0, length)
        begin, end = st.integers(0, edge), st.integers(length - edge, length)
        at = draw(st.one_of(begin, end, anywhere))
        width = draw(st.integers(0, 8))
        match draw(st.sampled_from(["flip", "cut", "double", "insert", "truncate"])):
            case "flip" if at < length:
                changed[at] ^= draw(st.integers(1, 255))
            case "cut":
                del changed[at : at + width]
            case "double":
                changed[at:at] = changed[at : at + width]
            case "insert":
                changed[at:at] = draw(st.binary(max_size=8))
            case _:
                del changed[at:]
    return bytes(changed)


NUM_MUTATIONS = pytest.mark.parametrize("number", [300, pytest.param(5000, marks=pytest.mark.slow)])


def run_often(check: Callable[[st.DataObject], None], number: int) -> None:
    """Run a check on `number` drawn examples."""
    settings(max_examples=number)(given(st.data())(check))()
