import torch
from hypothesis import given
from hypothesis import strategies as st

from powernorm_lab.data.subwords import END_ID
from powernorm_lab.tasks.translation.data import TokenLists

SENTENCES = st.lists(st.lists(st.integers(1, 99), max_size=6), min_size=1, max_size=8)


@given(SENTENCES, st.data())
def test_rows_are_the_sentences(sentences: list[list[int]], data: st.DataObject) -> None:
    lists = TokenLists.from_lists(sentences)
    rows = data.draw(st.lists(st.integers(0, len(sentences) - 1), min_size=1, max_size=9))
    chosen = torch.tensor(rows)
    longest = max(len(sentences[row]) + 1 for row in rows)
    ids, mask = lists.padded(chosen)
    shifted = lists.shifted(chosen)
    assert ids.shape == shifted.shape == (len(rows), longest)
    assert ids.dtype == shifted.dtype == torch.int64
    assert (mask is None) == all(len(sentences[row]) + 1 == longest for row in rows)
    for place, row in enumerate(rows):
        length = len(sentences[row]) + 1
        filling = [0] * (longest - length)
        assert ids[place].tolist() == [*sentences[row], END_ID, *filling]
        assert shifted[place].tolist() == [END_ID, *sentences[row], *filling]
        if mask is not None:
            assert mask[place].tolist() == [column >= length for column in range(longest)]


@given(SENTENCES)
def test_stream_and_lengths(sentences: list[list[int]]) -> None:
    lists = TokenLists.from_lists(sentences)
    assert len(lists) == len(sentences)
    assert lists.lengths.tolist() == [len(row) + 1 for row in sentences]
    assert lists.tokens.tolist() == [token for row in sentences for token in [*row, END_ID]]
    for number, row in enumerate(sentences):
        assert lists.row(number).tolist() == [*row, END_ID]
