import pytest
import torch
from torch import nn

from powernorm_lab.models.dropout import Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_features_are_dropped_at_the_rate_and_the_rest_is_scaled(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((400, 500), 3.0, dtype=dtype, requires_grad=True)
    y = Dropout(0.2)(x)
    assert y.dtype == dtype
    assert float((y == 0).double().mean()) == pytest.approx(0.2, abs=5e-3)
    assert torch.allclose(y[y != 0], torch.tensor(3.75, dtype=dtype), rtol=1e-2)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)  # the gradient has the mask of the features
    assert torch.allclose(x.grad[y != 0], torch.tensor(1.25, dtype=dtype), rtol=1e-2)


def test_it_is_torch_s_dropout_where_nothing_is_drawn() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not Dropout(1.0)(x).any()
    assert isinstance(Dropout(0.1), nn.Dropout)
    with pytest.raises(ValueError, match="dropout probability"):
        Dropout(1.5)
