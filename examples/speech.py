"""A small Conformer on utterances of different lengths, whose BatchNorms leave out padding.

    python speech.py                                # synthetic utterances
    python speech.py JapaneseVowels_TRAIN.ts.xz     # real ones: 9 speakers say /ae/

The file is Japanese Vowels of the UCI Machine Learning Repository (CC BY 4.0), as sktime ships it,
plain or compressed by xz: a line an utterance. The task is to name the speaker.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm

Batch = tuple[Tensor, Tensor, Tensor]
"""Features (batch, time, features), lengths, speakers."""


class Layer(nn.Module):
    """A layer of a Conformer: self-attention, convolution over time, feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.gate = nn.Linear(width, 2 * width)
        self.convolution = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        """Return the layer's output for x (batch, time, width); the mask is True at padding."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, key_padding_mask, need_weights=False)[0]
        y = F.glu(self.gate(self.norms[1](x))).transpose(1, 2)
        y = F.silu(self.batch_norm(self.convolution(y))).transpose(1, 2)
        x = x + self.out(y)
        return self.norms[3](x + self.feed_forward(self.norms[2](x)))


class Conformer(nn.Module):
    """Classifier of utterances."""

    def __init__(self, num_features: int, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(num_features, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, num_classes)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return the scores (batch, classes) of utterances with so many frames."""
        padding = torch.arange(features.shape[1], device=features.device) >= lengths[:, None]
        x = self.up(features)
        for layer in self.layers:
            x = layer(x, padding)
        summed = x.masked_fill(padding.unsqueeze(-1), 0.0).sum(1)
        return self.head(summed / lengths[:, None])


def read(path: Path) -> list[tuple[Tensor, int]]:
    """Return utterances (time, features) and their speakers from a file in the format `.ts`."""
    content = path.read_bytes()
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    rows = [line.split(":") for line in text.splitlines() if line and line[0] not in "#@"]
    return [
        (torch.tensor([[float(v) for v in one.split(",")] for one in row]).T, int(label) - 1)
        for *row, label in rows
    ]


def made_up(count: int = 270) -> list[tuple[Tensor, int]]:
    """Return noise around a curve of each of 9 speakers, 7 to 29 frames of 12 features."""
    torch.manual_seed(1)
    curves = torch.randn(9, 30, 12).cumsum(1) / 3
    lengths = torch.randint(7, 30, (count,)).tolist()
    return [(curves[i % 9, :n] + torch.randn(n, 12) / 2, i % 9) for i, n in enumerate(lengths)]


def batches(utterances: list[tuple[Tensor, int]], size: int = 30) -> Iterator[Batch]:
    """Yield padded batches in a random order."""
    for part in torch.randperm(len(utterances)).split(size):
        features, speakers = zip(*(utterances[i] for i in part), strict=True)
        lengths = torch.tensor([len(one) for one in features])
        yield nn.utils.rnn.pad_sequence(features, True), lengths, torch.tensor(speakers)


def gap(model: nn.Module, utterances: list[tuple[Tensor, int]]) -> float:
    """Return the difference of outputs for a padded batch from those for each utterance alone."""
    features, lengths, _ = next(batches(utterances))
    with torch.no_grad():
        together = model(features, lengths)
        alone = [model(x[None, :n], n[None]) for x, n in zip(features, lengths, strict=True)]
    return float((together - torch.cat(alone)).abs().max())


def export(model: nn.Module, example: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    """Export with a free batch and time, to ONNX too if that is installed, and compare."""
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    sizes = {"features": {0: batch, 1: time}, "lengths": {0: batch}}
    program = torch.export.export(model, example, dynamic_shapes=sizes)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*other), model(*other))
    print("torch.export: equal for another batch and length")
    if find_spec("onnxscript") and find_spec("onnxruntime"):
        from powernorm.integrations import onnx

        onnx_program = onnx.export(model, example, dynamic_shapes=sizes)
        print(f"ONNX: relative error {onnx.largest_error(onnx_program, model, other):.0e}")


def main(path: str = "", epochs: int = 10) -> None:
    """Diagnose, mask, train, compare, export."""
    utterances = read(Path(path)) if path else made_up()
    torch.manual_seed(0)
    model = Conformer(utterances[0][0].shape[1], 9)
    inputs = [(features, lengths) for features, lengths, _ in batches(utterances)]
    print(powernorm.diagnose(model, inputs, spectra=False))

    print(f"as torch has it, padding changes outputs by {gap(model.eval(), utterances):.3f}")
    print(powernorm.mask_batch_norms(model).plan)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model.train()
    for _ in range(epochs):
        for features, lengths, speakers in batches(utterances):
            loss = F.cross_entropy(model(features, lengths), speakers)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")

    model.eval()
    difference = gap(model, utterances)
    print(f"masked, an utterance in a batch differs from the same alone by {difference:.0e}")
    assert difference < 1e-4
    export(model, (inputs[0][0][:5], inputs[0][1][:5]), inputs[1])


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model is slower with more
    main(*sys.argv[1:2])
