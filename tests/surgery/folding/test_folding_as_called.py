"""Folded models as they are called: modes, fused attention, states, numbers, other branches."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.errors import InputError
from surgery.static_models import left_of, settle

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


@pytest.mark.thinned(1)
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


# Buffers that the forward writes


class _Streaming(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor, Tensor], object], behind: bool) -> None:
        super().__init__()
        self.a, self.norm, self.write = nn.Linear(C, C), powernorm.BatchNorm(C), write
        self.behind = behind
        self.table = nn.Embedding(3, C, max_norm=0.5)
        self.register_buffer("state", torch.zeros(C))
        self.register_buffer("passing", torch.zeros(C), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.behind:
            y = self.a(self.norm(x) + self.state)
        else:
            y = self.norm(self.a(x) + self.state + self.passing)
        self.write(self, x.mean((0, 1)), y)
        return y


class _Renormed(_Streaming):
    """The table is written by torch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x) + self.table(torch.ones(5).long()))


WRITES: dict[str, Callable[[Any, Tensor, Tensor], object]] = {
    "copied": lambda m, new, _: m.state.copy_(new),
    "set": lambda m, new, _: setattr(m, "state", new),
    "added": lambda m, new, _: m.state.add_(new),
    "a slice": lambda m, new, _: m.state[2:].copy_(new[2:]),
    "a view": lambda m, new, _: m.state.view(2, -1).mul_(0.5).add_(new.sum()),
    "of the output": lambda m, _, y: m.state.copy_(y.mean((0, 1))),
    "of the norm": lambda m, *_: m.norm.running_mean.mul_(0.9),
    "not persistent": lambda m, new, _: m.passing.copy_(new),
    "renormed": lambda *_: None,
    "behind": lambda m, new, _: m.state.copy_(new),
}


@pytest.mark.parametrize(
    "kind", some_default(WRITES, "copied", "a view", "of the norm", "renormed", "behind")
)
def test_buffers_that_the_forward_writes_are_inputs(kind: str) -> None:
    model = settle(
        (_Renormed if kind == "renormed" else _Streaming)(WRITES[kind], kind == "behind")
    )
    buffers = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    original = deepcopy(model)
    chunks = torch.randn(3, 2, 5, C)
    (row,) = powernorm.fold(model, chunks[0]).rows
    assert left_of(row) == ("keep" if kind == "of the norm" else "multiply-add")
    if kind in ("of the norm", "behind"):
        written = "norm.running_mean" if kind == "of the norm" else "state"
        assert f"the model's forward writes {written}" in row.reason
    now = dict(model.named_buffers())
    assert all(torch.equal(now[name], value) for name, value in values.items() if name in now)
    assert now["state"] is buffers["state"]
    with torch.no_grad():
        for chunk in chunks:
            torch.testing.assert_close(model(chunk), original(chunk))


# Numbers


class _Using(nn.Module):
    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.head, self.use = powernorm.BatchNorm(C), nn.Linear(C, 3), use

    def forward(self, x: Tensor, v: Any = 0.0, more: Any = None) -> Tensor:
        return self.head(self.use(self.norm(x), v if more is None else more["v"][0]))


_WEIGHT = torch.randn(C, C, 3, generator=torch.Generator().manual_seed(0))

NUMBERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "added": lambda h, v: h + v,
    "added behind arithmetic": lambda h, v: h + (2 * v + 1 - 1),
    "subtracted": lambda h, v: h - int(v),
    "alpha": lambda h, v: torch.add(h, h, alpha=v + 1),
    "alpha of a difference": lambda h, v: torch.sub(h, h.flip(1) * 2, alpha=v + 1),
    "filled in": lambda h, v: h.masked_fill(torch.arange(5)[:, None] > 2, v),
    "padding": lambda h, v: F.pad(h, (0, 0, 1, 0), value=v),
    "padding of a pool": lambda h, v: F.avg_pool1d(h.mT, 3, 1, int(v)).mT,
    "padding of a convolution": lambda h, v: F.conv1d(h.mT, _WEIGHT, padding=int(v)).mT,
    "a branch": lambda h, v: torch.relu(h) if v > 0.2 else h,
    "a branch below": lambda h, v: torch.relu(h) if v < 0 else h,
}


GIVEN = [
    *((name, "by position") for name in NUMBERS),
    *(
        (name, given)
        for name in ("added", "padding of a pool")
        for given in ("by name", "nested", "int", "by default")
    ),
]
QUICK = (
    *(("added", given) for given in ("by name", "nested", "by default")),
    *(("alpha", "by position"), ("a branch", "by position"), ("padding of a pool", "int")),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in GIVEN if one not in QUICK)],
)
def test_numbers_of_arguments_may_change(name: str, given: str) -> None:
    model = settle(_Using(NUMBERS[name]))
    original = deepcopy(model)
    x = torch.randn(2, 5, C)
    inputs: Any = {
        "by position": (x, 0.0),
        "by name": {"x": x, "v": 0.0},
        "nested": {"x": x, "more": {"v": (0.0, 3)}},
        "int": (x, 0),
        "by default": x,
    }[given]
    (row,) = powernorm.fold(model, inputs).rows
    if "branch" not in name and "convolution" not in name:
        assert row.action == "simplify"
        assert "in place of 0" in row.reason
    with torch.no_grad():
        for v in (0.0, 1.0, -1.0, 0.3):
            if "padding of" in name and v < 0:
                continue
            torch.testing.assert_close(model(x, v), original(x, v), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", some_default(["added", "alpha", "padding of a pool"], "alpha"))
def test_numbers_of_modules_are_constants(name: str) -> None:
    model = settle(_Using(lambda h, _: NUMBERS[name](h, 0.0)))
    assert powernorm.fold(model, torch.randn(2, 5, C)).rows[0].action == "fold"


def test_numbers_of_sizes_may_change() -> None:
    model = settle(_Using(lambda h, _: h + (h.shape[1] - 5)))
    original = deepcopy(model)
    x = torch.randn(2, 5, C)
    (row,) = powernorm.fold(model, x).rows
    assert "of 6 in place of 5" in row.reason
    longer = torch.randn(2, 9, C)
    torch.testing.assert_close(model(longer), original(longer), atol=1e-5, rtol=1e-5)


def test_numbers_that_only_one_value_works_for() -> None:
    """Such as a number of heads."""

    def run(h: Tensor, v: Any) -> Tensor:
        if v != 2:
            raise ValueError("2 heads")
        return h.unflatten(1, (v, -1)).flatten(1, 2)

    model = settle(_Using(run))
    x = torch.randn(2, 4, C)
    assert powernorm.fold(model, (x, 2)).rows[0].action == "fold"
