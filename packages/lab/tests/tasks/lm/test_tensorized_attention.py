"""The tensorized attention against its definition, element by element."""

import math

import pytest
import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms import build_norm
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.layers import AttentionLayer
from powernorm_lab.tasks.lm.model import TensorizedAttention

FEATURES, HEAD, LENGTH = 6, 3, 7


def attention(
    *, sees_future: bool = False, length: int = LENGTH, seed: int = 0
) -> TensorizedAttention:
    """Return an attention in float64 with u, v and g far from their small initial values."""
    torch.manual_seed(seed)
    made = TensorizedAttention(FEATURES, HEAD, length, sees_future=sees_future).double()
    with torch.no_grad():
        for parameter in (made.content_bias, made.position_bias, made.core_weight):
            parameter.normal_()
    return made


def encoding(distance: int) -> Tensor:
    angles = [distance / 10000 ** (2 * i / FEATURES) for i in range(FEATURES // 2)]
    return torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)], dtype=torch.float64)


def naive(module: TensorizedAttention, x: Tensor) -> Tensor:
    """Compute the whole tensor element by element."""
    (length, _), size = x.shape, module.max_length
    q, k, v = (x @ module.query_key_value.weight.T).split(HEAD, dim=-1)
    u, w, g = module.content_bias, module.position_bias, module.core_weight
    rows = []
    for i in range(length):
        flat = torch.zeros(size * size, dtype=torch.float64)
        for j in range(length):
            p = module.position.weight @ encoding(i - j)
            for n in range(length):
                if module.sees_future or (j <= i and n <= i):
                    terms = g * ((q[i] + u) * k[j] + (q[i] + w) * p) * v[n]
                    flat[j * size + n] = terms.sum()
        rows.append(module.output.weight @ flat)
    return torch.stack(rows)


@pytest.mark.parametrize("sees_future", [False, True])
@pytest.mark.parametrize("length", range(1, LENGTH + 1))
@torch.no_grad()
def test_equals_its_definition(length: int, sees_future: bool) -> None:
    module = attention(sees_future=sees_future)
    x = torch.randn(2, length, FEATURES, dtype=torch.float64)
    expected = torch.stack([naive(module, row) for row in x])
    # The encodings are of float32.
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    assert float(expected.abs().mean()) > 0.01


@pytest.mark.parametrize("sees_future", [False, True])
def test_gradients(sees_future: bool) -> None:
    module = attention(sees_future=sees_future, length=5)
    names = [name for name, _ in module.named_parameters()]
    assert len(names) == 6

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        called: Tensor = torch.func.functional_call(module, given, (x,))
        return called

    x = torch.randn(2, 4, FEATURES, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *module.parameters()))


@torch.no_grad()
def test_sees_no_later_token_not_even_one_that_is_not_finite() -> None:
    module = attention()
    x = torch.randn(1, LENGTH, FEATURES, dtype=torch.float64)
    expected = module(x)
    for position in range(LENGTH):
        for value in (0.0, 1e6, math.nan, math.inf):
            changed = x.clone()
            changed[:, position] = value
            got = module(changed)
            assert torch.equal(got[:, :position], expected[:, :position])
            assert not torch.equal(got[:, position:], expected[:, position:])


@torch.no_grad()
def test_without_the_mask_every_output_sees_the_last_token() -> None:
    module = attention(sees_future=True)
    x = torch.randn(1, LENGTH, FEATURES, dtype=torch.float64)
    changed = x.clone()
    changed[:, -1] += 1
    assert ((module(changed) - module(x)).abs().amax(-1) > 1e-3).all()


@torch.no_grad()
def test_beginning_of_a_segment_is_as_in_the_whole() -> None:
    module = attention()
    x = torch.randn(3, LENGTH, FEATURES, dtype=torch.float64)
    whole = module(x)
    for length in range(1, LENGTH):
        torch.testing.assert_close(module(x[:, :length]), whole[:, :length])


def test_process_without_rows() -> None:
    assert attention()(torch.zeros(0, LENGTH, FEATURES, dtype=torch.float64)).shape[0] == 0


def test_begins_with_weights_that_sum_to_one() -> None:
    module = TensorizedAttention(FEATURES, HEAD, LENGTH)
    assert float(module.core_weight.detach().sum()) == pytest.approx(1)
    assert len(set(module.core_weight.tolist())) == HEAD
    assert 0 < float(module.content_bias.detach().abs().max()) < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    module = TensorizedAttention(FEATURES, HEAD, LENGTH)
    x = torch.randn(2, LENGTH, FEATURES)
    expected = module(x)
    with torch.autocast("cpu", dtype):
        got = module(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)


def test_padding_cannot_be_hidden_from_what_sees_the_future() -> None:
    layer = AttentionLayer(
        attention(sees_future=True).float(),
        TransformerShape(num_features=FEATURES, feedforward_features=8),
        lambda n: build_norm("ln", n),
    )
    x = torch.randn(2, LENGTH, FEATURES)
    assert layer(x).shape == x.shape
    with pytest.raises(InputError, match="would see the padding, too"):
        layer(x, torch.zeros(2, LENGTH, dtype=torch.bool))
