import math

import pytest
import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.tasks.ner.model import (
    DirectionalAttention,
    by_position,
    offset_codes,
)

FEATURES, HEADS = 12, 3


def attention(dropout: float = 0.0) -> DirectionalAttention:
    module = DirectionalAttention(FEATURES, HEADS, dropout=dropout).double()
    module.draw_weights(torch.Generator().manual_seed(1))
    return module


def code(offset: int, size: int) -> list[float]:
    """Return R of Yan et al. 2019, eq. 10, with sines first."""
    angles = [offset / 10000 ** (2 * i / size) for i in range(size // 2)]
    return [*map(math.sin, angles), *map(math.cos, angles)]


def naive(module: DirectionalAttention, x: Tensor, lengths: list[int]) -> Tensor:
    """Compute the attention with loops over rows, heads and positions, in float64."""
    size = FEATURES // HEADS
    out = torch.zeros_like(x)
    for row, length in enumerate(lengths):
        queries = x[row] @ module.query.weight.T
        values = x[row] @ module.value.weight.T
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            u, v = module.content_bias[head, 0], module.offset_bias[head, 0]
            for t in range(x.shape[1]):
                q = queries[t, part]
                scores = []
                for j in range(length):
                    k = x[row, j, part]
                    r = torch.tensor(code(t - j, size), dtype=x.dtype)
                    scores.append(q @ k + q @ r + u @ k + v @ r)
                weights = torch.stack(scores).softmax(0)
                out[row, t, part] = weights @ values[:length, part]
    return out


@pytest.mark.parametrize("lengths", [[5, 5], [5, 3], [1, 5]])
@torch.no_grad()
def test_attention_is_that_of_the_paper(lengths: list[int]) -> None:
    module = attention()
    x = torch.randn(2, 5, FEATURES, dtype=torch.float64)
    mask = torch.arange(5) >= torch.tensor(lengths)[:, None]
    expected = naive(module, x, lengths)
    # The sinusoids are made in float32.
    torch.testing.assert_close(module(x, mask), expected, atol=1e-6, rtol=1e-6)
    if lengths == [5, 5]:
        torch.testing.assert_close(module(x), expected, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_single_word_attends_to_itself() -> None:
    module = attention()
    x = torch.randn(1, 1, FEATURES, dtype=torch.float64)
    torch.testing.assert_close(module(x), module.value(x))


@torch.no_grad()
def test_left_and_right_differ_and_only_the_distance_counts() -> None:
    codes = offset_codes(6, 8)
    assert codes.shape == (11, 8)
    torch.testing.assert_close(codes[:, :4], -codes.flip(0)[:, :4])
    torch.testing.assert_close(codes[:, 4:], codes.flip(0)[:, 4:])
    for row, offset in enumerate(range(5, -6, -1)):
        torch.testing.assert_close(codes[row], torch.tensor(code(offset, 8)))
    # The attention of a mirrored sentence is not the mirrored attention.
    module = attention()
    x = torch.randn(1, 6, FEATURES, dtype=torch.float64)
    assert not torch.allclose(module(x.flip(1)), module(x).flip(1))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_scores_by_offset_become_scores_by_position(length: int) -> None:
    scores = torch.arange(2.0 * length * (2 * length - 1)).view(2, length, 2 * length - 1)
    got = by_position(scores)
    for t in range(length):
        for j in range(length):
            assert torch.equal(got[:, t, j], scores[:, t, length - 1 + j - t])


def test_gradients_and_padding_alone_are_finite() -> None:
    module = attention(dropout=0.2)
    x = torch.randn(2, 4, FEATURES, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, False, False, True], [True, True, True, True]])
    module(x, mask).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert torch.autograd.gradcheck(
        attention(), (torch.randn(1, 3, FEATURES).double().requires_grad_(),)
    )


def test_heads_must_divide_the_features() -> None:
    with pytest.raises(InputError, match="num_heads=3 does not divide num_features=9 into heads"):
        DirectionalAttention(9, 3)
