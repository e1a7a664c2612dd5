"""A miniature of each speech library's conventions: BatchNorm leaves out padding, nothing leaks.

Written from the libraries' documented interfaces: what says where padding is (lengths, fractions,
masks of both signs), the layout of vectors, subsampling, causal convolutions.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm

WIDTH = 8
LENGTHS = torch.tensor([24, 17, 12, 9])


def padding_of(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) >= lengths[:, None]


class Convolution(nn.Module):
    """The convolution module: gate, depthwise convolution, BatchNorm; x: (batch, time, width)."""

    def __init__(self, *, causal: bool = False, erases: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.left = 4 if causal else 2
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=0 if causal else 2, groups=WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.causal = causal
        self.erases = erases
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        y = F.glu(self.gate(x)).transpose(1, 2)
        if self.erases and padding is not None:
            y = y.masked_fill(padding[:, None], 0.0)
        y = self.conv(F.pad(y, (4, 0)) if self.causal else y)
        return self.out(F.silu(self.norm(y)).transpose(1, 2))


class Layer(nn.Module):
    """Attention that knows of padding, and the convolution module."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.convolution = Convolution(**options)

    def attend(self, x: Tensor, padding: Tensor) -> Tensor:
        return x + self.attention(x, x, x, padding, need_weights=False)[0]


class TorchaudioLayer(Layer):
    """(time, batch, width) between the layers, padding as `key_padding_mask`."""

    def forward(self, input: Tensor, key_padding_mask: Tensor | None) -> Tensor:  # noqa: A002
        x = input.transpose(0, 1)
        assert key_padding_mask is not None
        x = self.attend(x, key_padding_mask)
        return (x + self.convolution(x)).transpose(0, 1)


class Torchaudio(nn.Module):
    """`forward(input, lengths)` returns outputs and lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TorchaudioLayer() for _ in range(2))

    def forward(self, input: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        padding = padding_of(lengths, int(lengths.max()))
        x = input.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding)
        return x.transpose(0, 1), lengths


class EspnetLayer(Layer):
    """The mask is True at frames, (batch, 1, time), and comes back with the output."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.attend(x, ~mask[:, 0])
        return x + self.convolution(x), mask


class Subsampling(nn.Module):
    """A quarter of the frames by two convolutions of stride 2, which read zeros at padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = x.transpose(1, 2)
        for conv in (self.first, self.second):
            x = F.relu(conv(x.masked_fill(padding_of(lengths, x.shape[-1])[:, None], 0.0)))
            lengths = (lengths + 1) // 2
        return x.transpose(1, 2), lengths


class Espnet(nn.Module):
    """`forward(xs_pad, ilens)`, subsampled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Subsampling()
        self.encoders = nn.ModuleList(EspnetLayer() for _ in range(2))

    def forward(self, xs_pad: Tensor, ilens: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = self.embed(xs_pad, ilens)
        masks = ~padding_of(lengths, x.shape[1])[:, None]
        for layer in self.encoders:
            x, masks = layer(x, masks)
        return x, masks.squeeze(1).sum(1)


class NemoLayer(Layer):
    """`att_mask` (batch, time, time) and `pad_mask` (batch, time), True at padding; zeros there."""

    def forward(self, x: Tensor, att_mask: Tensor, pad_mask: Tensor) -> Tensor:
        heads = att_mask.repeat_interleave(2, 0)
        # A row of padding would see nothing.
        heads = heads & ~torch.eye(x.shape[1], dtype=torch.bool)
        x = x + self.attention(x, x, x, attn_mask=heads, need_weights=False)[0]
        return x + self.convolution(x, pad_mask)


class Nemo(nn.Module):
    """`forward(audio_signal, length)` with (batch, features, time) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NemoLayer(erases=True) for _ in range(2))

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        x = audio_signal.transpose(1, 2)
        pad_mask = padding_of(length, x.shape[1])
        att_mask = pad_mask[:, None] | pad_mask[:, :, None]
        for layer in self.layers:
            x = layer(x, att_mask, pad_mask)
        return x.transpose(1, 2), length


class SpeechbrainLayer(Layer):
    """`src_key_padding_mask`, True at padding."""

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        assert src_key_padding_mask is not None
        x = self.attend(x, src_key_padding_mask)
        return x + self.convolution(x, src_key_padding_mask)


class Speechbrain(nn.Module):
    """`forward(src, wav_len)` with the length of each as a fraction of the longest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SpeechbrainLayer(erases=True) for _ in range(2))

    def forward(self, src: Tensor, wav_len: Tensor) -> Tensor:
        padding = padding_of(torch.round(wav_len * src.shape[1]), src.shape[1])
        for layer in self.layers:
            src = layer(src, src_key_padding_mask=padding)
        return src


class Wrapped(nn.Module):
    """A BatchNorm in a module that could transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class SpeechbrainTdnn(nn.Module):
    """Speakers' vectors: squeeze, statistics over time, a BatchNorm of (batch, features, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)
        self.norm = Wrapped(WIDTH)
        self.squeeze = nn.Conv1d(WIDTH, WIDTH, 1)
        self.pooled_norm = Wrapped(2 * WIDTH)

    def forward(self, x: Tensor, wav_lens: Tensor) -> Tensor:
        valid = ~padding_of(torch.round(wav_lens * x.shape[1]), x.shape[1])[:, None]
        number = valid.sum(2, keepdim=True)
        y = self.norm(F.relu(self.conv(x.transpose(1, 2))))
        mean = (y * valid).sum(2, keepdim=True) / number
        y = y * torch.sigmoid(self.squeeze(mean))
        mean = (y * valid).sum(2, keepdim=True) / number
        deviation = (((y - mean) * valid).square().sum(2, keepdim=True) / number + 1e-5).sqrt()
        return self.pooled_norm(torch.cat([mean, deviation], 1)).transpose(1, 2)


class WenetLayer(Layer):
    """`mask_pad` (batch, 1, time) is True at frames; causal convolutions."""

    def forward(self, x: Tensor, mask: Tensor, mask_pad: Tensor) -> tuple[Tensor, Tensor]:
        del mask
        x = self.attend(x, ~mask_pad[:, 0])
        return x + self.convolution(x, ~mask_pad[:, 0]), mask_pad


class Wenet(nn.Module):
    """`forward(xs, xs_lens)`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(WenetLayer(causal=True, erases=True) for _ in range(2))

    def forward(self, xs: Tensor, xs_lens: Tensor) -> tuple[Tensor, Tensor]:
        masks = ~padding_of(xs_lens, xs.shape[1])[:, None]
        for layer in self.encoders:
            xs, _ = layer(xs, masks, masks)
        return xs, masks


class IcefallLayer(Layer):
    """(time, batch, width), `src_key_padding_mask` True at padding; the convolution reads zeros."""

    def forward(self, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        x = self.attend(src.transpose(0, 1), src_key_padding_mask)
        return (x + self.convolution(x, src_key_padding_mask)).transpose(0, 1)


class Icefall(nn.Module):
    """`forward(x, x_lens)`, subsampled, (time, batch, width) inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_embed = Subsampling()
        self.layers = nn.ModuleList(IcefallLayer(erases=True) for _ in range(2))

    def forward(self, x: Tensor, x_lens: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = self.encoder_embed(x, x_lens)
        padding = padding_of(lengths, x.shape[1])
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding)
        return x.transpose(0, 1), lengths


Batch = dict[str, Tensor]
FRACTIONS = ("wav_len", "wav_lens")


def made(
    name: str, by: str, lengths: Tensor, width: int, *, first: bool, value: float = 3.0
) -> Batch:
    """Inputs that are equal at frames, whatever the width, with a value at padding."""
    frames = torch.randn(len(lengths), 40, WIDTH, generator=torch.Generator().manual_seed(1))
    x = frames[:, :width].clone()
    x[padding_of(lengths, width)] = value
    given = lengths / width if by in FRACTIONS else lengths
    return {name: x.transpose(1, 2) if first else x, by: given}


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str, bool]] = {
    "torchaudio": (Torchaudio, "input", "lengths", False),
    "espnet": (Espnet, "xs_pad", "ilens", False),
    "nemo": (Nemo, "audio_signal", "length", True),
    "speechbrain": (Speechbrain, "src", "wav_len", False),
    "speechbrain-tdnn": (SpeechbrainTdnn, "x", "wav_lens", False),
    "wenet": (Wenet, "xs", "xs_lens", False),
    "icefall": (Icefall, "x", "x_lens", False),
}


@pytest.mark.parametrize("library", MODELS)
def test_masked_batch_norms_leave_out_padding(library: str) -> None:
    build, name, by, first = MODELS[library]
    torch.manual_seed(0)
    model = build()
    batch = made(name, by, LENGTHS, 24, first=first)
    model.train()(**batch)  # running statistics of their own

    masked = powernorm.mask_batch_norms(model)
    assert len(masked.norms) == 2
    assert all(row.mask for row in masked.plan.rows if row.action == "swap"), str(masked.plan)
    report = powernorm.padding_check(model.eval(), batch, LENGTHS)
    assert report.is_clean, str(report)


@pytest.mark.parametrize("library", MODELS)
def test_more_padding_changes_no_statistics(library: str) -> None:
    """Plain BatchNorm counts it: the same utterances in a wider batch give other statistics."""
    build, name, by, first = MODELS[library]
    # A mask that may be either way round is read once a row fills the batch; here none does.
    powernorm.declare_mask("mask", "keep", EspnetLayer)
    for is_masked in (False, True):
        found = []
        # torchaudio's width is that of the longest: there the padding has other values.
        for width, value in ((24, 3.0), (24, -5.0) if library == "torchaudio" else (36, 3.0)):
            torch.manual_seed(0)
            model = build().double()
            if is_masked:
                powernorm.mask_batch_norms(model)
            batch = made(name, by, LENGTHS, width, first=first, value=value)
            model.train()(**batch | {name: batch[name].double()})
            found.append(torch.cat([buffer.flatten() for buffer in model.buffers()]))
        assert torch.allclose(*found, rtol=1e-9, atol=1e-9) == is_masked
