"""Folded models as they are called: modes, fused attention, states, numbers, other branches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from surgery.static_models import settle

C = 16


def _encoder(bias: bool, norm_first: bool, batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        C, 2, 32, batch_first=batch_first, bias=bias, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class _Model(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Linear(4, C), encoder, nn.Linear(C, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=padding))


@pytest.mark.parametrize("keep", ["nothing", "statistics"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_torch_encoders_run_in_every_mode(
    bias: bool, norm_first: bool, keep: str, tmp_path: Path
) -> None:
    model = _Model(_encoder(bias, norm_first))
    if keep == "nothing":
        powernorm.swap(model, "bn")
    settle(model)
    with torch.no_grad():
        for norm in (part for part in model.modules() if isinstance(part, nn.LayerNorm)):
            norm.weight.uniform_(0.5, 1.5)
    x, padding = torch.randn(8, 5, 4), torch.arange(5).expand(8, 5) >= 4
    inputs = ((x,), (x, padding))
    want = [model(*one).detach() for one in inputs]
    report = powernorm.fold(model, x, more_examples=[inputs[1]], keep=keep)
    if keep == "nothing":
        assert {row.action for row in report.rows} == {"fold"}
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for one, expected in zip(inputs, want, strict=True):
                kept = expected.clone() if mode is not torch.inference_mode else expected
                torch.testing.assert_close(model(*one), kept, atol=1e-5, rtol=1e-5)
    if keep == "nothing":
        powernorm.save(model, tmp_path)
        again = powernorm.load(tmp_path, _Model(_encoder(bias, norm_first)))
        with torch.no_grad():
            torch.testing.assert_close(again(x), want[0], atol=1e-5, rtol=1e-5)


def test_a_layer_behind_a_folded_norm_leaves_its_fused_path() -> None:
    """A fused layer with biases in its attention alone would fail."""

    def run(bias: bool) -> tuple[nn.Module, Tensor]:
        attention = nn.MultiheadAttention(C, 2, bias=bias, batch_first=True)
        model = settle(_Attention(attention))
        return model, torch.randn(2, 5, C)

    for bias in (False, True):
        model, x = run(bias)
        want = model(x).detach()
        (row,) = powernorm.fold(model, x).rows
        assert row.action == "fold"
        with torch.no_grad():
            torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-5)


class _Attention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = powernorm.BatchNorm(C), attention

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.attention(h, h, h, need_weights=False)[0]


class _Failing(_Attention):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled() and not isinstance(self.norm, powernorm.BatchNorm):
            raise ValueError("no")
        return super().forward(x)


def test_a_folded_model_that_fails_in_one_mode_is_refused() -> None:
    model = settle(_Failing(nn.MultiheadAttention(C, 2, batch_first=True)))
    with pytest.raises(InputError, match=r"under torch\.inference_mode\(\) \(ValueError: no\)"):
        powernorm.fold(model, torch.randn(2, 5, C))
    assert isinstance(model.norm, powernorm.BatchNorm)


class _Counting(nn.Module):
    """The second call is another function than the first, which no graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(C, C), powernorm.BatchNorm(C)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.norm(self.a(x)) + (self.calls[0] % 4 > 1)


def test_a_state_outside_of_tensors_is_refused() -> None:
    with pytest.raises(InputError, match="does not give the original's outputs"):
        powernorm.fold(settle(_Counting()), torch.randn(2, 5, C))
