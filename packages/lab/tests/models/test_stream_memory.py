import pytest
import torch
from torch import Tensor

from powernorm_lab.models.stream_memory import StreamMemory, merged_states, own_state

LENGTH = 3


def places(*starts: int) -> Tensor:
    return torch.tensor(starts)


def contexts(value: float, rows: int = 2, positions: int = 8) -> list[Tensor]:
    """Return contexts of two layers, with the number of each position after the decimal point."""
    base = torch.arange(positions) / 100 + value
    return [base[None, :, None].expand(rows, -1, 1) + layer * 10 for layer in range(2)]


def step(memory: StreamMemory, starts: Tensor, value: float) -> float | None:
    """Read a batch of four positions, and return its memory."""
    seen = memory.recall(starts)
    memory.keep(4, contexts(value, rows=len(starts)))
    return None if seen is None else float(seen[0][0, 0, 0])


def test_goes_on_where_a_batch_ended() -> None:
    memory = StreamMemory(LENGTH)
    assert step(memory, places(0, 100), 1.0) is None
    assert step(memory, places(4, 104), 2.0) == pytest.approx(1.05)
    assert step(memory, places(8, 108), 3.0) == pytest.approx(2.05)


@pytest.mark.parametrize("starts", [(0, 100), (8, 108), (4, 100), (4,), (104, 4)])
def test_any_other_batch_begins_anew(starts: tuple[int, ...]) -> None:
    memory = StreamMemory(LENGTH)
    step(memory, places(0, 100), 1.0)
    assert step(memory, places(*starts), 2.0) is None


def test_the_same_batch_again_finds_the_same() -> None:
    memory = StreamMemory(LENGTH)
    step(memory, places(0, 100), 1.0)
    assert step(memory, places(4, 104), 2.0) == step(memory, places(4, 104), 3.0)
    # The next batch continues the latest one.
    assert step(memory, places(8, 108), 4.0) == pytest.approx(3.05)


def test_keeps_the_end_of_each_layer() -> None:
    memory = StreamMemory(LENGTH)
    memory.recall(places(0))
    source = [x.clone().requires_grad_() for x in contexts(1.0, rows=1)]
    memory.keep(4, source)
    seen = memory.recall(places(4))
    assert seen is not None
    assert [tuple(layer.shape) for layer in seen] == [(1, LENGTH, 1)] * 2
    assert seen[1].flatten().tolist() == pytest.approx([11.05, 11.06, 11.07])
    assert not any(layer.requires_grad for layer in seen)
    # A copy, not a view of the whole context.
    assert seen[0].untyped_storage().nbytes() == LENGTH * 4


def test_batches_that_take_turns() -> None:
    memory = StreamMemory(LENGTH, num_lanes=2)
    step(memory, places(0), 1.0)
    step(memory, places(500), 2.0)
    assert step(memory, places(4), 3.0) == pytest.approx(1.05)
    assert step(memory, places(504), 4.0) == pytest.approx(2.05)
    assert step(memory, places(0), 5.0) is None, "a new epoch"
    assert step(memory, places(500), 6.0) is None
    assert step(memory, places(4), 7.0) == pytest.approx(5.05)
    assert step(memory, places(504), 8.0) == pytest.approx(6.05)


def test_a_pass_never_meets_what_another_left() -> None:
    """Validation uses one lane of a memory with two."""
    memory = StreamMemory(LENGTH, num_lanes=2)
    for place in (0, 4, 8):
        step(memory, places(place), 1.0 + place)
    assert step(memory, places(0), 20.0) is None
    assert step(memory, places(4), 21.0) == pytest.approx(20.05)
    assert step(memory, places(8), 22.0) == pytest.approx(21.05)
    assert step(memory, places(8), 23.0) == pytest.approx(21.05), "once more"


def test_no_more_is_kept_than_takes_turns() -> None:
    memory = StreamMemory(LENGTH)
    step(memory, places(0), 1.0)
    step(memory, places(500), 2.0)
    assert step(memory, places(4), 3.0) is None
    assert len(memory.state()) == 1


@pytest.mark.parametrize("length", [0, LENGTH])
def test_nothing_is_kept_of_what_does_not_go_on(length: int) -> None:
    memory = StreamMemory(length)
    memory.recall(places(0))
    memory.keep(4, contexts(1.0) if length == 0 else None)
    assert memory.recall(places(4)) is None


def test_inference_mode_does_not_stay() -> None:
    memory = StreamMemory(LENGTH)
    with torch.inference_mode():
        step(memory, places(0), 1.0)
    seen = memory.recall(places(4))
    assert seen is not None
    weight = torch.ones(1, requires_grad=True)
    (seen[0] * weight).sum().backward()
    assert weight.grad is not None


def test_a_state_goes_on_exactly() -> None:
    memory, other = StreamMemory(LENGTH, num_lanes=2), StreamMemory(LENGTH, num_lanes=2)
    step(memory, places(0, 100), 1.0)
    step(memory, places(500, 600), 2.0)
    other.load_state(memory.state())
    for starts, value in ((places(4, 104), 3.0), (places(504, 604), 4.0), (places(8, 108), 5.0)):
        expected = memory.recall(starts)
        got = other.recall(starts)
        assert expected is not None
        assert got is not None
        assert all(map(torch.equal, got, expected))
        for one in (memory, other):
            one.keep(4, contexts(value))


@pytest.mark.parametrize("rows", [1, 2, 5, 6])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (3, 1), (4, 4)])
def test_rows_find_their_way_between_processes(rows: int, sizes: tuple[int, int]) -> None:
    """The first number of processes writes the state, the second number reads it."""
    starts = torch.arange(rows) * 100
    layers = torch.randn(2, rows, LENGTH, 1)
    whole = [{"starts": starts, "layers": layers}]
    parts = [own_state(whole, rank, sizes[0]) for rank in range(sizes[0])]
    memories = []
    for part in parts:
        memory = StreamMemory(LENGTH)
        memory.load_state(part)
        memories.append(memory)
    merged = merged_states([memory.state() for memory in memories])
    assert torch.equal(merged[0]["starts"], starts)
    assert torch.equal(merged[0]["layers"], layers)
    for rank in range(sizes[1]):
        (own,) = own_state(merged, rank, sizes[1])
        assert torch.equal(own["starts"], starts[rank :: sizes[1]])
        assert torch.equal(own["layers"], layers[:, rank :: sizes[1]])


def test_an_empty_state_stays_empty() -> None:
    memory = StreamMemory(LENGTH)
    memory.recall(places(0))
    memory.keep(4, None)
    merged = merged_states([memory.state(), memory.state()])
    memory.load_state(own_state(merged, 1, 2))
    assert memory.recall(places(4)) is None
    assert merged_states([[], []]) == []
