"""A small classifier without norms, only in integers: int8 weights and activations, shifts, sums.

    python integer_only.py

A residual network over frames of speech (Japanese Vowels, 9 speakers, in `powernorm-data`) is
trained with BatchNorm, folded, trained a little more with quantizers in place, and converted.
Scales are powers of two: each layer is a product of int8 numbers with sums in int32 and a
rounding shift to the right. A second implementation in plain Python, whose integers have no limit,
computes the same bits and checks that no sum leaves int32. At the end come the operators that a
twin with LayerNorm would need besides the integers.

Quantizers come after the fold. Before it they would round weights that folding then multiplies by
γ/σ of each feature, so that the rounded values would not be on any grid afterwards.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions

import powernorm
from powernorm_lab.tasks.sequences.data import SeriesSplit, load_series

WIDTH, HIDDEN, BLOCKS = 24, 48, 2
INT8, INT32 = (-128, 127), (-(2**31), 2**31 - 1)


class Frames(nn.Module):
    """Pre-norm residual blocks on each frame; the class scores of all frames are added up.

    Shape:
        frames (batch, length, features), padding_mask (batch, length) bool; output (batch, classes)
    """

    def __init__(self, num_features: int, num_classes: int, norm: str) -> None:
        super().__init__()
        self.embed = nn.Linear(num_features, WIDTH)
        self.norms = nn.ModuleList(powernorm.build_norm(norm, WIDTH) for _ in range(BLOCKS + 1))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(BLOCKS))
        self.downs = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, frames: Tensor, padding_mask: Tensor) -> Tensor:
        """Return the sums of the scores of all frames."""
        x = self.embed(frames)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=False):
            x = x + down(up(norm(x, padding_mask)).relu())
        scores: Tensor = self.head(self.norms[-1](x, padding_mask))
        return scores.masked_fill(padding_mask[..., None], 0).sum(1)


def padded(split: SeriesSplit) -> tuple[Tensor, Tensor, Tensor]:
    """Return frames (series, length, features), padding_mask and labels."""
    frames = nn.utils.rnn.pad_sequence(list(split.frames.split(split.lengths.tolist())), True)
    padding_mask = torch.arange(frames.shape[1]) >= split.lengths[:, None]
    return frames, padding_mask, split.labels


def train(model: nn.Module, data: SeriesSplit, steps: int, learning_rate: float) -> None:
    """Train on batches of 32 series."""
    frames, padding_mask, labels = padded(data)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(labels), (32,), generator=generator)
        scores = model(frames[rows], padding_mask[rows])
        means = scores / (~padding_mask[rows]).sum(1, keepdim=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(means, labels[rows]).backward()
        optimizer.step()
        schedule.step()


class Layer(NamedTuple):
    """A linear map in integers, int32: weight (outputs, inputs) with values of int8, bias, shift.

    The shifts to the right are per output, at least 0; `lowest` is -128, or 0 for a ReLU.
    """

    weight: Tensor
    bias: Tensor
    shift: Tensor
    lowest: int

    def sums(self, x: Tensor) -> Tensor:
        """Return the sums before the shift, int32; x is int32 with values of int8."""
        return x @ self.weight.T + self.bias

    def narrowed(self, x: Tensor) -> Tensor:
        """Return the sums over 2^shift, rounded and limited to int8."""
        y = (self.sums(x) + ((1 << self.shift) >> 1)) >> self.shift
        return y.clamp(self.lowest, INT8[1])


def bits(largest: Tensor) -> Tensor:
    """Return the largest e for which `largest * 2^e` is at most 127."""
    return torch.floor(torch.log2(127 / largest.clamp(min=2.0**-20)))


class Quantized(nn.Module):
    """A folded `Frames` with a quantizer at each weight and activation, scaled on some frames."""

    def __init__(self, model: Frames, frames: Tensor) -> None:
        super().__init__()
        self.model = model
        self.linears = [model.embed, model.head]
        for up, down in zip(model.ups, model.downs, strict=True):
            self.linears[-1:-1] = [up, down]
        x = model.embed(frames)
        streams, hidden = [x], []
        for up, down in zip(model.ups, model.downs, strict=True):
            hidden.append(up(x).relu())
            x = x + down(hidden[-1])
            streams.append(x)
        # Scales are 2^-exponent: of the input, the stream and the hidden features.
        self.input, self.stream = bits(frames.abs().max()), bits(torch.cat(streams).abs().max())
        self.hidden = [bits(one.max()) for one in hidden]

    def exponents(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Return the exponents of input, weights (a row each) and output of each linear map."""
        inner = [pair for one in self.hidden for pair in ((self.stream, one), (one, self.stream))]
        ends = [(self.input, self.stream), *inner, (self.stream, None)]
        found = []
        for linear, (before, after) in zip(self.linears, ends, strict=True):
            largest = linear.weight.detach().abs().amax(1)
            rows = bits(largest if after is not None else largest.max().expand_as(largest))
            found.append((before, rows, after))
        return found

    def forward(self, frames: Tensor, padding_mask: Tensor) -> Tensor:
        """Return the scores in floating point, rounded like in int8; for training."""
        maps = iter(zip(self.linears, self.exponents(), strict=True))

        def apply(x: Tensor, *, relu: bool = False) -> Tensor:
            linear, (_, rows, after) = next(maps)
            zeros = torch.zeros_like(rows, dtype=torch.int32)
            weight = torch.fake_quantize_per_channel_affine(
                linear.weight, 2**-rows, zeros, 0, *INT8
            )
            y = nn.functional.linear(x, weight, linear.bias)
            return y if after is None else rounded(y.relu() if relu else y, after)

        x = apply(rounded(frames, self.input))
        for _ in self.hidden:
            x = rounded(x + apply(apply(x, relu=True)), self.stream)
        return apply(x).masked_fill(padding_mask[..., None], 0).sum(1)

    def converted(self) -> list[Layer]:
        """Return the layers in integers."""
        layers = []
        for linear, (before, rows, after) in zip(self.linears, self.exponents(), strict=True):
            shift = torch.zeros_like(rows) if after is None else before + rows - after
            assert shift.min() >= 0, "weights too large for the scale of the output"
            weight = (linear.weight.detach() * 2 ** rows[:, None]).round().clamp(*INT8)
            bias = (linear.bias.detach() * 2 ** (before + rows)).round()
            lowest = 0 if any(linear is up for up in self.model.ups) else INT8[0]
            layers.append(Layer(weight.int(), bias.int(), shift.int(), lowest))
        return layers


def rounded(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x on the grid of int8 numbers over 2^exponent, with the gradient of x inside it."""
    return torch.fake_quantize_per_tensor_affine(x, float(2**-exponent), 0, *INT8)


def scores_in_torch(layers: list[Layer], x: Tensor, padding_mask: Tensor) -> Tensor:
    """Return the scores, int32; x is int32 with values of int8."""
    embed, *inner, head = layers
    x = embed.narrowed(x)
    for up, down in zip(inner[::2], inner[1::2], strict=True):
        x = (x + down.narrowed(up.narrowed(x))).clamp(*INT8)
    return head.sums(x).masked_fill(padding_mask[..., None], 0).sum(1, dtype=torch.int32)


def scores_in_python(layers: list[Layer], frames: list[list[int]]) -> list[int]:
    """Return the scores of one series without padding; an AssertionError if a sum is no int32."""

    def apply(layer: Layer, x: list[int]) -> list[int]:
        rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        sums = [sum(w * v for w, v in zip(row, x, strict=True)) + bias for row, bias in rows]
        assert all(INT32[0] <= one <= INT32[1] for one in sums)
        return sums

    def narrowed(layer: Layer, x: list[int]) -> list[int]:
        sums = zip(apply(layer, x), layer.shift.tolist(), strict=True)
        return [min(max((y + (1 << s >> 1)) >> s, layer.lowest), INT8[1]) for y, s in sums]

    embed, *inner, head = layers
    scores = [0] * len(head.bias)
    for frame in frames:
        x = narrowed(embed, frame)
        for up, down in zip(inner[::2], inner[1::2], strict=True):
            branch = narrowed(down, narrowed(up, x))
            x = [min(max(a + b, INT8[0]), INT8[1]) for a, b in zip(x, branch, strict=True)]
        scores = [a + b for a, b in zip(scores, apply(head, x), strict=True)]
    assert all(INT32[0] <= score <= INT32[1] for score in scores)
    return scores


def operators(model: nn.Module, frames: Tensor, padding_mask: Tensor) -> Counter[str]:
    """Return torch's elementary operators of a model by name."""
    parts = torch.export.default_decompositions()
    parts.update(get_decompositions([torch.ops.aten.native_layer_norm]))
    traced = torch.export.export(model, (frames, padding_mask)).run_decompositions(parts)
    names = (getattr(node.target, "__name__", "").split(".")[0] for node in traced.graph.nodes)
    return Counter(name for name in names if name not in ("", "getitem", "_assert_tensor_metadata"))


def main(steps: int = 1500) -> dict[str, float]:
    """Train, fold, quantize, convert, compare; return the accuracies and the size."""
    torch.manual_seed(0)
    data = load_series(None)
    test, padding_mask, labels = padded(data.splits["test"])
    frames, _, _ = padded(data.splits["train"])
    model = Frames(data.num_features, len(data.classes), "bn")
    twin = Frames(data.num_features, len(data.classes), "ln")
    for one in (model, twin):
        train(one, data.splits["train"], steps, 1e-2)
        one.eval()

    with torch.no_grad():
        scores = {"LayerNorm": twin(test, padding_mask), "BatchNorm": model(test, padding_mask)}
        folded = powernorm.fold(model, (test, padding_mask), inplace=False).model
        quantized = Quantized(copy.deepcopy(folded), frames)  # type: ignore[arg-type]
    x = (test * 2**quantized.input).round().clamp(*INT8).int()
    scores["int8"] = scores_in_torch(quantized.converted(), x, padding_mask)
    train(quantized, data.splits["train"], steps // 3, 1e-3)
    layers = quantized.converted()
    scores["int8, trained with quantizers"] = last = scores_in_torch(layers, x, padding_mask)
    for series, length, expected in zip(x, (~padding_mask).sum(1), last, strict=True):
        assert scores_in_python(layers, series[:length].tolist()) == expected.tolist()
    found = {
        name: float((one.argmax(-1) == labels).double().mean()) for name, one in scores.items()
    }
    found["bytes"] = sum(one.weight.numel() + 5 * len(one.bias) for one in layers)
    for name, value in found.items():
        print(f"{name}: {value:g}")
    more = operators(twin, test, padding_mask) - operators(folded, test, padding_mask)
    print(f"all {len(labels)} series: the bits of plain Python; a LayerNorm twin adds {dict(more)}")
    return found


if __name__ == "__main__":
    main()
