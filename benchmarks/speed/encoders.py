"""Encoders of one architecture and one set of weights that differ in their norms, and as files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
from powernorm import InputError
from powernorm.integrations.onnx import export
from powernorm.surgery.folding.structure import FoldedNorm

Placement = Literal["pre", "post"]
Kind = Literal["folded", "identity", "LayerNorm", "RMSNorm", "BatchNorm", "DyT"]
NormFactory = Callable[[int], nn.Module]

VOCABULARY: Final = 1000
LONGEST: Final = 128
_EPS: Final = 1e-5
_CALIBRATION_SEEDS: Final = range(100, 108)
"""Seeds of the tokens on which ranges are measured; timed tokens have others."""


class Size(NamedTuple):
    """One architecture."""

    features: int
    heads: int
    hidden: int
    """Size inside the feed-forward networks."""
    placement: Placement
    """Position of the norms."""
    layers: int = 6

    @property
    def label(self) -> str:
        """A short name."""
        return f"{self.layers} layers × {self.features} features, {self.placement}-norm"


SIZES: Final = tuple(
    Size(*size, placement)
    for size in ((512, 8, 2048), (384, 12, 1536))
    for placement in ("pre", "post")
)


class Layer(nn.Module):
    """Attention and feed-forward network.

    torch's own has a fused path for LayerNorm that no other norm has.

    Args:
        size: the architecture.
        norm: makes each norm.
        activation: between the linear maps.
    """

    def __init__(
        self, size: Size, norm: NormFactory, activation: Callable[[Tensor], Tensor] = F.gelu
    ) -> None:
        super().__init__()
        features = size.features
        self.is_pre = size.placement == "pre"
        self.num_heads = size.heads
        self.activation = activation
        self.query = nn.Linear(features, features)
        self.key_value = nn.Linear(features, 2 * features)
        self.output = nn.Linear(features, features)
        self.attention_norm = norm(features)
        self.up, self.down = nn.Linear(features, size.hidden), nn.Linear(size.hidden, features)
        self.feedforward_norm = norm(features)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, features) for the same."""
        for norm, part in (
            (self.attention_norm, self._attend),
            (self.feedforward_norm, lambda y: self.down(self.activation(self.up(y)))),
        ):
            x = x + part(norm(x)) if self.is_pre else norm(x + part(x))
        return x

    def _attend(self, x: Tensor) -> Tensor:
        parts = map(self._heads, (self.query(x), *self.key_value(x).chunk(2, dim=-1)))
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        return self.output(mixed)

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        return x.view(batch, length, self.num_heads, features // self.num_heads).transpose(1, 2)


class Encoder(nn.Module):
    """A sentence encoder: embeddings, layers, and with pre-norm a last norm.

    Args:
        size: the architecture.
        norm: makes each norm.
    """

    def __init__(self, size: Size, norm: NormFactory) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, size.features)
        self.positions = nn.Parameter(torch.empty(LONGEST, size.features).normal_())
        self.layers = nn.Sequential(*(Layer(size, norm) for _ in range(size.layers)))
        self.norm = norm(size.features) if size.placement == "pre" else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) → (batch, length, features)."""
        x = self.words(tokens) + self.positions[: tokens.shape[1]]
        return self.norm(self.layers(x))


_NORMS: Final[dict[Kind, NormFactory]] = {
    "LayerNorm": partial(nn.LayerNorm, eps=_EPS),
    "RMSNorm": partial(nn.RMSNorm, eps=_EPS),
    "BatchNorm": partial(powernorm.BatchNorm, eps=_EPS),
    "DyT": powernorm.DynamicTanh,
}


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return words, (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def build_encoders(size: Size, kinds: Collection[Kind]) -> dict[Kind, nn.Module]:
    """Return encoders of one architecture, in evaluation mode and float32.

    All have the same random weights, as far as they have any, those with BatchNorm population
    statistics of random tokens; `identity` has the folded one's weights and biases and no norms.

    Raises:
        InputError: a norm did not fold without a rest.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        original = Encoder(size, _NORMS["BatchNorm"]).eval()
        for parameter in original.parameters():
            # γ, β and biases away from 1 and 0, as training leaves them.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    powernorm.calibrate(original, [random_tokens(4, 64, seed) for seed in (1, 2)])
    report = powernorm.fold(original, random_tokens(1, 16), inplace=False)
    left = [row.name for row in report.rows if row.action != "fold"]
    if left:
        raise InputError(f"the benchmark's model keeps {left}: nothing is timed")
    bare = deepcopy(report.model)
    for name, module in report.model.named_modules():
        if isinstance(module, FoldedNorm):
            bare.set_submodule(name, nn.Identity().eval())
    found: dict[Kind, nn.Module] = {"folded": report.model, "identity": bare, "BatchNorm": original}
    for kind in set(kinds) - found.keys():
        found[kind] = Encoder(size, _NORMS[kind]).eval()
        # DyT's α, which starts at 0.5, has no counterpart, nor has a statistic or RMSNorm's shift.
        found[kind].load_state_dict(original.state_dict(), strict=False)
    return {kind: found[kind] for kind in kinds}


class _Affine(nn.Module):
    """A BatchNorm as one multiply-add a feature."""

    def __init__(self, norm: powernorm.BatchNorm) -> None:
        super().__init__()
        scale, shift = (part.detach().float() for part in norm.affine())
        self.scale, self.shift = nn.Parameter(scale), nn.Parameter(shift)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class OnnxFiles:
    """ONNX files of the encoders of one size, each made when it is first asked for.

    Args:
        models: in evaluation mode and float32.
        folder: where the files go.
    """

    def __init__(self, models: Mapping[Kind, nn.Module], folder: Path) -> None:
        self._models = models
        self._folder = folder

    def path(self, kind: Kind, inputs: tuple[int, int], precision: str) -> Path:
        """Return the file of an encoder for so many sequences of so many tokens.

        OpenVINO computes the file of float32 in bfloat16.

        Raises:
            InputError: it cannot be exported or quantized.
        """
        precision = precision if precision.startswith("int8") else "float32"
        file = self._folder / f"{kind} {inputs} {precision}.onnx"
        if file.exists():
            return file
        if precision == "float32":
            export(_exportable(self._models[kind]), random_tokens(*inputs)).save(file)
            return file
        # It needs onnxruntime, which those that time torch alone may lack.
        from speed.int8_example import quantize_dynamic, quantize_static

        float_file = self.path(kind, inputs, "float32")
        if precision == "int8 dynamic":
            quantize_dynamic(float_file, file)
        else:
            batches = [(random_tokens(*inputs, seed),) for seed in _CALIBRATION_SEEDS]
            operators = "all" if precision.endswith("all") else "matmul"
            quantize_static(float_file, file, batches, operators)
        return file


def _exportable(model: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorms are the multiply-add that their constants fold to."""
    made = deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, powernorm.BatchNorm):
            made.set_submodule(name, _Affine(module))
    return made
