from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from powernorm.diagnosis.regrouping import Regrouping
from refusals import refuses


def regrouped(calls: list[Tensor], sizes: tuple[int, ...]) -> dict[int, list[Tensor]]:
    seen: dict[int, list[Tensor]] = {size: [] for size in sizes}
    regrouping = Regrouping(sizes, lambda size, sums: seen[size].append(sums))
    for call in calls:
        regrouping.add(call)
    return seen


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=12),
    st.sampled_from([(2,), (3, 6), (2, 4, 8), (4, 8, 12), (5, 10, 15)]),
)
def test_equals_cutting_the_whole_stream(lengths: list[int], sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    calls = [torch.randn(n, 2, 3, generator=generator, dtype=torch.float64) for n in lengths]
    stream = torch.cat(calls)
    seen = regrouped(calls, sizes)
    for size in sizes:
        expected = [part.sum(0) for part in stream.split(size) if len(part) == size]
        torch.testing.assert_close(seen[size], expected)


@pytest.mark.parametrize(
    ("sizes", "word"), [((), "empty"), ((1, 2), "1"), ((4, 6), "multiple"), ((True,), "True")]
)
def test_sizes_that_cannot_be_made(sizes: Any, word: str) -> None:
    refuses(word, Regrouping, sizes, lambda *_: None)


def test_a_size_that_is_named_twice_is_made_once() -> None:
    assert Regrouping((4, 2, 4), lambda *_: None).sizes == (2, 4)
