"""`padding_check` finds every leak that is planted, by name, and none in models without."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import powernorm
from covering import some_default
from powernorm.diagnosis import padding_check
from powernorm.errors import InputError
from refusals import refuses
from surgery.foreign_models import FAMILIES, PADDED, conformer_module

LENGTHS = (11, 6, 9, 4)
B, T, C = len(LENGTHS), max(LENGTHS), 8
PADDING = torch.arange(T) >= torch.tensor(LENGTHS)[:, None]


def hidden(x: Tensor, padding: Tensor) -> Tensor:
    """(B, T, C) with zeros at padding."""
    return x.masked_fill(padding[..., None], 0.0)


def mean(x: Tensor, padding: Tensor) -> Tensor:
    return hidden(x, padding).sum(1) / (~padding).sum(1, keepdim=True)


class Convolution(nn.Module):
    """A depthwise convolution, its input masked or not; `kind` is what stands in front."""

    def __init__(self, is_clean: bool, front: nn.Module, **options: Any) -> None:
        super().__init__()
        self.is_clean = is_clean
        self.first = nn.Linear(C, C)
        self.front = front
        if isinstance(front, nn.BatchNorm1d):
            nn.init.normal_(front.running_mean)
        self.conv = nn.Conv1d(C, C, **{"kernel_size": 5, "padding": 2, "groups": C, **options})

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        x = self.front(self.first(x).transpose(1, 2))
        if self.is_clean:
            x = x.masked_fill(padding_mask[:, None], 0.0)
        return self.conv(x).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, is_clean: bool, **options: Any) -> None:
        super().__init__()
        self.is_clean = is_clean
        self.turned = not options.get("batch_first", True)
        self.attn = nn.MultiheadAttention(C, 2, **{"batch_first": True, **options})
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        mask = padding_mask if self.is_clean else None
        y = x.transpose(0, 1) if self.turned else x
        y = self.attn(y, y, y, key_padding_mask=mask, need_weights=False)[0]
        return self.head(y.transpose(0, 1) if self.turned else y)


class OwnAttention(nn.Module):
    """Scores and their softmax in a forward, as people write it."""

    def __init__(self, is_clean: bool) -> None:
        super().__init__()
        self.is_clean = is_clean
        self.to_scores = nn.Linear(C, C)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        scores = self.to_scores(x) @ x.transpose(1, 2)
        if self.is_clean:
            scores = scores.masked_fill(padding_mask[:, None], -torch.inf)
        return scores.softmax(-1) @ x


class Pooled(nn.Module):
    def __init__(self, is_clean: bool, kind: str) -> None:
        super().__init__()
        self.is_clean, self.kind = is_clean, kind
        self.body = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        y = self.body(x)
        if self.kind == "mean":
            pooled = mean(y, padding_mask) if self.is_clean else y.mean(1)
        elif self.kind == "max":
            low = y.masked_fill(padding_mask[..., None], -torch.inf)
            pooled = (low if self.is_clean else y).amax(1)
        else:  # the last position
            last = (~padding_mask).sum(1) - 1
            pooled = y[torch.arange(len(y)), last] if self.is_clean else y[:, -1]
        return self.head(pooled)


class Recurrent(nn.Module):
    def __init__(self, is_clean: bool, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.is_clean = is_clean
        self.rnn = rnn
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        if not self.is_clean:
            return self.head(self.rnn(x)[0])
        lengths = (~padding_mask).sum(1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(y)


class AfterNorm(nn.Module):
    """A norm over channels and time; the clean one is of each position."""

    def __init__(self, is_clean: bool, norm: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C) if is_clean else norm
        self.is_clean = is_clean

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        del padding_mask
        if self.is_clean:
            return self.norm(x)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Squeezed(nn.Module):
    """Squeeze and excitation: a gate by the mean over time."""

    def __init__(self, is_clean: bool) -> None:
        super().__init__()
        self.is_clean = is_clean
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.gate = nn.Sequential(nn.Linear(C, C), nn.Sigmoid())

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        if self.is_clean:
            return x * self.gate(mean(x, padding_mask))[:, None]
        return x * self.gate(self.pool(x.transpose(1, 2)).squeeze(-1))[:, None]


class Subsampled(nn.Module):
    """Two convolutions of stride 2: behind the first one padding is not 0 any more."""

    def __init__(self, is_clean: bool) -> None:
        super().__init__()
        self.is_clean = is_clean
        self.one = nn.Conv1d(C, C, 3, 2, padding=1)
        self.two = nn.Conv1d(C, C, 3, 2, padding=1)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        y = self.one(hidden(x, padding_mask).transpose(1, 2)).relu()
        if self.is_clean:
            y = y.masked_fill(padding_mask[:, None, ::2], 0.0)
        return self.two(y).transpose(1, 2)


class Mixed(nn.Module):
    """Fourier mixing over time, or an exponential average from the end."""

    def __init__(self, is_clean: bool, kind: str) -> None:
        super().__init__()
        self.is_clean, self.kind = is_clean, kind
        self.head = nn.Linear(C, 2)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        del padding_mask
        if self.is_clean:
            return self.head(x.cumsum(1))
        y = torch.fft.fft(x, dim=1).real if self.kind == "fourier" else x.flip(1).cumsum(1).flip(1)
        return self.head(y)


class Encoder(nn.Module):
    def __init__(self, is_clean: bool, **options: Any) -> None:
        super().__init__()
        self.is_clean = is_clean
        layer = nn.TransformerEncoderLayer(C, 2, 16, batch_first=True, **options)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=padding_mask if self.is_clean else None)


SELF = ("layers.layers.0.self_attn", "layers.layers.1.self_attn")
MODELS: dict[str, tuple[Callable[[bool], nn.Module], tuple[str, ...]]] = {
    "conv behind a linear map": (lambda c: Convolution(c, nn.Identity()), ("conv",)),
    "conv behind BatchNorm": (lambda c: Convolution(c, nn.BatchNorm1d(C)), ("conv",)),
    "dense conv": (lambda c: Convolution(c, nn.SiLU(), groups=1), ("conv",)),
    "dilated conv": (lambda c: Convolution(c, nn.SiLU(), dilation=2, padding=4), ("conv",)),
    "attention": (Attention, ("attn",)),
    "attention, time first": (lambda c: Attention(c, batch_first=False), ("attn",)),
    "own attention": (OwnAttention, ("",)),
    "mean": (lambda c: Pooled(c, "mean"), ("",)),
    "max": (lambda c: Pooled(c, "max"), ("",)),
    "last": (lambda c: Pooled(c, "last"), ("",)),
    "lstm": (lambda c: Recurrent(c, nn.LSTM(C, C, 1, True, True, 0, True)), ("rnn",)),
    "gru": (lambda c: Recurrent(c, nn.GRU(C, C, 2, True, True, 0, True)), ("rnn",)),
    "GroupNorm": (lambda c: AfterNorm(c, nn.GroupNorm(2, C)), ("norm",)),
    "InstanceNorm": (lambda c: AfterNorm(c, nn.InstanceNorm1d(C)), ("norm",)),
    "squeeze and excitation": (Squeezed, ("pool",)),
    "subsampling": (Subsampled, ("two",)),
    "fourier": (lambda c: Mixed(c, "fourier"), ("",)),
    "from the end": (lambda c: Mixed(c, "flip"), ("",)),
    "encoder": (Encoder, SELF),
    "pre-norm encoder": (lambda c: Encoder(c, norm_first=True), SELF),
}


def example() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(B, T, C, generator=generator), "padding_mask": PADDING}


def built(name: str, is_clean: bool) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0](is_clean)
    model(**example())  # sizes of lazy layers
    return model


@pytest.mark.parametrize("name", MODELS)
def test_planted_leaks_are_named(name: str) -> None:
    report = padding_check(built(name, is_clean=False), example())
    assert tuple(leak.module for leak in report.leaks) == MODELS[name][1], str(report)
    assert report.difference > 1e-3
    assert report.first is not None
    assert not report.not_compared
    assert all(leak.advice in str(report) for leak in report.leaks)


@pytest.mark.parametrize("name", MODELS)
def test_models_without_leaks_are_clean(name: str) -> None:
    report = padding_check(built(name, is_clean=True), example())
    assert report.is_clean, str(report)
    assert report.first is None
    assert report.changed_rows == 0
    verdict, *lines = str(report).splitlines()
    assert re.fullmatch(
        "padding changes nothing( in evaluation)?: 3 rows are the same alone", verdict
    )
    assert len(lines) == len(report.counting)


def test_batch_norms_that_count_padding_in_training_are_named() -> None:
    class Model(nn.Module):
        def __init__(self, packs: bool) -> None:
            super().__init__()
            self.packs = packs
            self.norm = nn.BatchNorm1d(C)
            self.flat = nn.BatchNorm1d(C)
            self.unstored = nn.BatchNorm1d(C, track_running_stats=False)

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            if self.packs:
                packed = torch.zeros_like(x)
                packed[~padding_mask] = self.flat(x[~padding_mask])
                return packed
            y = self.norm(x.transpose(1, 2)).transpose(1, 2)
            return self.flat(y.flatten(0, 1)).view_as(y).masked_fill(padding_mask[..., None], 0)

    model = Model(packs=False)
    report = padding_check(model, example())
    assert report.is_clean
    assert report.counting == ("norm", "flat")
    assert "in evaluation: 3 rows" in str(report)
    assert "- norm: this BatchNorm counts padding in its statistics in training" in str(report)
    powernorm.mask_batch_norms(model)
    assert padding_check(model, example()).counting == ()
    assert padding_check(Model(packs=True), example()).counting == ()


def test_all_leaks_are_found_also_behind_others_and_around_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = Convolution(False, nn.BatchNorm1d(C))
            self.attn = Attention(False)

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            return self.attn(self.conv(x, padding_mask), padding_mask).mean(1)

    report = padding_check(Model(), example())
    assert [leak.module for leak in report.leaks] == ["conv.conv", "attn.attn", ""]
    assert [leak.kind for leak in report.leaks] == ["Conv1d", "MultiheadAttention", "Model"]
    assert [leak.reach for leak in report.leaks] == [2, 9, None]
    assert report.first == "conv.conv"


def test_masked_batch_norms_leave_no_leak() -> None:
    model = built("conv behind BatchNorm", is_clean=False)
    assert not padding_check(model, example()).is_clean
    powernorm.mask_batch_norms(model)
    assert padding_check(model, example()).is_clean


def test_answers_that_change_are_counted() -> None:
    model = built("last", is_clean=False)
    report = padding_check(model, example())
    batch = example()
    answers = model.eval()(**batch).argmax(-1)
    alone = [
        int(model(batch["x"][i : i + 1, :n], PADDING[i : i + 1, :n]).argmax())
        for i, n in enumerate(LENGTHS)
    ]
    assert report.num_rows == 3
    assert report.changed_rows == sum(int(a) != b for a, b in zip(answers, alone, strict=True))


@pytest.mark.parametrize(
    "lengths", [torch.tensor(LENGTHS), list(LENGTHS), torch.tensor(LENGTHS) / T]
)
def test_lengths_of_every_kind_are_read(lengths: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(C, C, 3, padding=1)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            del lengths
            return self.conv(x.transpose(1, 2))

    model = Model()
    report = padding_check(model, (example()["x"], lengths))
    assert [(leak.module, leak.reach) for leak in report.leaks] == [("conv", 1)]
    assert report == padding_check(model, (example()["x"], None), LENGTHS)


def test_padding_on_the_left() -> None:
    model = built("conv behind a linear map", is_clean=False)
    batch = example() | {"padding_mask": PADDING.flip(1)}
    report = padding_check(model, batch)
    assert [(leak.module, leak.reach) for leak in report.leaks] == [("conv", 2)]
    model.is_clean = True
    assert padding_check(model, batch).is_clean


def test_tables_of_relative_positions_are_laid_by_their_middle() -> None:
    """A longer table is no leak."""

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(1, C)

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            size = x.shape[1]
            places = torch.arange(1 - size, size, dtype=x.dtype)[:, None]
            scores = torch.einsum("btc,rc->btr", x, self.table(places))
            index = torch.arange(size)[None] - torch.arange(size)[:, None] + size - 1
            scores = scores.gather(-1, index.expand(len(x), -1, -1))
            return scores.masked_fill(padding_mask[:, None], -torch.inf).softmax(-1) @ x

    report = padding_check(Relative(), example())
    assert report.is_clean, str(report)


def test_rows_that_lie_behind_each_other() -> None:
    """Positions of all rows in one dimension, with padding or without."""

    class Flat(nn.Module):
        def __init__(self, packs: bool) -> None:
            super().__init__()
            self.packs = packs
            self.inner = nn.Sequential(nn.Linear(C, C), nn.GELU())

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            if not self.packs:
                return self.inner(x.flatten(0, 1)).view_as(x)
            y = torch.zeros_like(x)
            y[~padding_mask] = self.inner(x[~padding_mask])
            return y

    for packs in (False, True):
        report = padding_check(Flat(packs), example())
        assert report.is_clean, str(report)
        assert not report.not_compared


def test_what_is_not_compared_is_said_where_nothing_else_explains_a_difference() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(C, C)

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            del padding_mask
            state = x.new_zeros(len(x), C)
            for step in range(x.shape[1]):
                state = self.cell(x[:, step], state)
            return state

    report = padding_check(Looped(), example())
    assert not report.is_clean
    assert report.not_compared["cell"] == "it is called less often alone"


class Plain(nn.Module):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        del padding_mask
        return F.relu(x)


@pytest.mark.parametrize(
    ("batch", "lengths", "words"),
    [
        ((torch.ones(4, 11, C),), None, "nothing in the batch marks padding: give lengths="),
        ((torch.ones(4, 11, C),), [11] * 4, "all 4 rows have 11 positions"),
        ((torch.ones(4, 11, C),), [12, 3, 4, 5], "lengths go up to 12, and the batch has"),
        ((torch.ones(4, 11, C),), [11, 0, 4, 5], "the rows have the lengths [11, 0, 4, 5]"),
        (
            (torch.ones(2, 3, C), torch.tensor([[False, True, False], [False, False, False]])),
            None,
            "padding_mask marks positions in the middle of rows",
        ),
    ],
)
def test_batches_that_cannot_be_checked(batch: Any, lengths: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        padding_check(Plain(), batch, lengths)
    assert words in str(caught.value)


def test_a_model_that_takes_no_row_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(T * C, 2))
    refuses("the model cannot run row 3 alone", padding_check, model, example()["x"], LENGTHS)


FOREIGN = [name for name in PADDED if name != "whisper-encoder"]  # takes one length alone


@pytest.mark.parametrize("name", some_default(FOREIGN, "bert", "torch-transformer", "gpt2"))
def test_models_of_libraries_keep_padding_out(name: str) -> None:
    model, _ = FAMILIES[name]()
    report = padding_check(model, PADDED[name](2))
    assert report.is_clean, str(report)


def test_a_conformer_lets_padding_in_until_its_norms_are_masked() -> None:
    module = conformer_module()
    torch.manual_seed(0)
    model = module.Conformer(8, num_heads=2, ffn_dim=16, num_layers=2, depthwise_conv_kernel_size=5)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            nn.init.normal_(norm.bias)
    batch = (torch.randn(3, 12, 8), torch.tensor([12, 7, 5]))
    report = padding_check(model, batch)
    where = [f"conformer_layers.{layer}.conv_module.sequential.2" for layer in (0, 1)]
    assert [(leak.module, leak.reach) for leak in report.leaks] == [(name, 2) for name in where]
    powernorm.mask_batch_norms(model)
    assert padding_check(model, batch).is_clean
