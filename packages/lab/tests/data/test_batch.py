import pytest
import torch
from torch import Tensor

from powernorm_lab.data.batch import IGNORED, Batch


def texts(lengths: list[int], width: int | None = None) -> Batch:
    width = width or max(lengths)
    padding = torch.arange(width) >= torch.tensor(lengths)[:, None]
    tokens = torch.arange(len(lengths) * width).reshape(len(lengths), width)
    return Batch(
        named={"tokens": tokens.masked_fill(padding, 0), "padding_mask": padding},
        targets=torch.arange(len(lengths)),
        num_tokens=sum(lengths),
        num_targets=len(lengths),
    )


def images(number: int) -> Batch:
    pixels = torch.rand(number, 1, 4, 4)
    return Batch({"pixels": pixels}, torch.arange(number), number, number)


@pytest.mark.parametrize("batch", [texts([3, 1, 4, 2, 2]), images(5)])
def test_parts_of_processes_are_the_whole(batch: Batch) -> None:
    parts = [batch.shard(rank, 2) for rank in range(2)]
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    assert sum(part.num_targets for part in parts) == batch.num_targets
    assert [part.loss_targets for part in parts] == [2.5, 2.5]
    for name, value in batch.named.items():
        torch.testing.assert_close(parts[0].named[name], value[::2])
        torch.testing.assert_close(parts[1].named[name], value[1::2])
    torch.testing.assert_close(parts[1].targets, batch.targets[1::2])


@pytest.mark.parametrize("batch", [texts([3]), images(1)])
def test_a_process_without_rows_is_asked_nothing(batch: Batch) -> None:
    part = batch.shard(1, 2)
    assert part.targets.tolist() == [IGNORED]
    assert (part.num_tokens, part.num_targets, part.loss_targets) == (0, 0, 0.5)
    if "padding_mask" in part.named:
        assert bool(part.named["padding_mask"].all())
    assert not batch.named.get("padding_mask", torch.zeros(1)).all()


def test_joined_texts_are_padded_to_the_longest() -> None:
    first, second = texts([2, 1]), texts([4, 3])
    whole = first.joined_with([second])
    mask, tokens = whole.named["padding_mask"], whole.named["tokens"]
    assert tokens.shape == mask.shape == (4, 4)
    assert (~mask).sum(1).tolist() == [2, 1, 4, 3]
    torch.testing.assert_close(tokens[:2, :2], first.named["tokens"])
    torch.testing.assert_close(tokens[2:], second.named["tokens"])
    assert not tokens[mask].any()
    assert (whole.num_tokens, whole.num_targets) == (10, 4)
    assert whole.targets.tolist() == [0, 1, 0, 1]


def test_joined_images() -> None:
    first, second = images(2), images(3)
    whole = first.joined_with([second])
    expected = torch.cat([first.named["pixels"], second.named["pixels"]])
    torch.testing.assert_close(whole.named["pixels"], expected)


def test_moved_and_given_to_a_model() -> None:
    class Model(torch.nn.Module):
        def forward(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
            return tokens.masked_fill(padding_mask, -1)

    batch = texts([1, 2]).to(torch.device("cpu"))
    assert Model()(**batch.inputs()).tolist() == [[0, -1], [2, 3]]
