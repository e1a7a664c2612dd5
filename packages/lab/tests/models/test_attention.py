import math

import pytest
import torch
from torch import Tensor

from powernorm_lab.models.attention import MultiHeadAttention


def by_hand(attention: MultiHeadAttention, x: Tensor, memory: Tensor, allowed: Tensor) -> Tensor:
    """Compute the attention of one example head by head; allowed: (length, memory length)."""
    features = x.shape[-1]
    size = features // attention.num_heads
    keys, values = attention.key_value(memory).split(features, dim=-1)
    heads = []
    for part in range(attention.num_heads):
        columns = slice(part * size, (part + 1) * size)
        scores = attention.query(x)[:, columns] @ keys[:, columns].T / math.sqrt(size)
        scores = scores.masked_fill(~allowed, -math.inf)
        heads.append(scores.softmax(-1) @ values[:, columns])
    return attention.output(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [0, 2])
def test_self_attention_against_its_definition(causal: bool, padded: int) -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 2, causal=causal)
    x = torch.randn(3, 5, 8)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[:, 5 - padded :] = True
    allowed = ~mask[0].expand(5, 5)
    if causal:
        allowed = allowed & torch.ones(5, 5, dtype=torch.bool).tril()
    expected = torch.stack([by_hand(attention, row, row, allowed) for row in x])
    valid = slice(0, 5 - padded)
    got = attention(x, padding_mask=mask)
    torch.testing.assert_close(got[:, valid], expected[:, valid])
    if not padded:
        torch.testing.assert_close(attention(x), expected)


def test_attention_over_a_memory() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 4)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 6, 8)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    expected = torch.stack(
        [by_hand(attention, x[i], memory[i], ~mask[i].expand(3, 6)) for i in range(2)]
    )
    torch.testing.assert_close(attention(x, memory, mask), expected)
