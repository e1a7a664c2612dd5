"""The encoders that are compared: one architecture and one set of weights, five kinds of norms."""

from __future__ import annotations

from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from powernorm.lab.bench.inference.cases import Size
from powernorm.lab.models.choices import TransformerShape
from powernorm.lab.models.layers import TransformerLayer, final_norm
from powernorm.lab.models.normed import NormFactory
from powernorm.lab.models.placements import layer_places
from powernorm.surgery import FoldReport, calibrate, fold
from powernorm.surgery.structure import FeatureAffine

Kind = Literal["folded", "identity", "LayerNorm", "RMSNorm", "BatchNorm"]
KINDS: Final[tuple[Kind, ...]] = ("folded", "identity", "LayerNorm", "RMSNorm", "BatchNorm")

VOCABULARY: Final = 1000
LONGEST: Final = 128
_EPS: Final = 1e-5


class PlainIdentity(nn.Module):
    """`nn.Identity` with the signature of a norm."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The input."""
        del padding_mask
        return x


class TorchLayerNorm(nn.LayerNorm):
    """torch's, with the signature of a norm."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """As `nn.LayerNorm`, without a call of its own in between."""
        del padding_mask
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class TorchRMSNorm(nn.RMSNorm):
    """torch's, with the signature of a norm."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """As `nn.RMSNorm`, without a call of its own in between."""
        del padding_mask
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Encoder(nn.Module):
    """A sentence encoder: embeddings, layers, and with pre-norm a last norm.

    The layers are this library's: torch's own take a fused path for LayerNorm that no other norm
    has.

    Args:
        size: the architecture.
        norm: makes each norm.
    """

    def __init__(self, size: Size, norm: NormFactory) -> None:
        super().__init__()
        shape = TransformerShape(
            num_features=size.features,
            num_heads=size.heads,
            feedforward_features=size.hidden,
            num_layers=size.layers,
            placement=size.placement,
        )
        self.words = nn.Embedding(VOCABULARY, size.features)
        self.positions = nn.Parameter(torch.empty(LONGEST, size.features).normal_())
        self.layers = nn.ModuleList(
            TransformerLayer(shape, norm, places=places) for places in layer_places(shape)
        )
        self.norm = final_norm(shape, norm) or PlainIdentity()

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) → (batch, length, features)."""
        x: Tensor = self.words(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y


_NORMS: Final[dict[Kind, NormFactory]] = {
    "identity": lambda _: PlainIdentity(),
    "LayerNorm": lambda features: TorchLayerNorm(features, eps=_EPS),
    "RMSNorm": lambda features: TorchRMSNorm(features, eps=_EPS),
    "BatchNorm": lambda features: powernorm.BatchNorm(features, eps=_EPS),
}


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Words, (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def build_encoders(size: Size) -> dict[Kind, nn.Module]:
    """The encoders of one architecture, in evaluation mode and float32.

    All have the same random weights, those with BatchNorm population statistics of random tokens;
    the floor has the folded one's weights and biases and no norms.

    Raises:
        InputError: a norm did not fold without a rest.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = Encoder(size, _NORMS["BatchNorm"]).eval()
        _spread(original)
    calibrate(original, [random_tokens(4, 64, seed) for seed in (1, 2)])
    report = fold(original, random_tokens(1, 16), inplace=False)
    left = [row.name for row in report.rows if row.action != "fold"]
    if left:
        raise InputError(f"the benchmark's model keeps {left}: nothing is timed")
    return {
        "folded": report.model,
        "identity": _floor(size, report),
        "LayerNorm": _with_weights_of(original, size, "LayerNorm"),
        "RMSNorm": _with_weights_of(original, size, "RMSNorm"),
        "BatchNorm": original,
    }


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """γ, β and biases away from 1 and 0, as training leaves them."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))


def _floor(size: Size, report: FoldReport) -> nn.Module:
    model = Encoder(size, _NORMS["identity"]).eval()
    for name, features in report.structure.biases.items():
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path).register_parameter(attribute, nn.Parameter(torch.zeros(features)))
    model.load_state_dict(report.model.state_dict())
    return model


def _with_weights_of(original: nn.Module, size: Size, kind: Kind) -> nn.Module:
    model = Encoder(size, _NORMS[kind]).eval()
    wanted = model.state_dict().keys()
    state = {name: value for name, value in original.state_dict().items() if name in wanted}
    model.load_state_dict(state)
    return model


def with_multiply_adds(model: nn.Module) -> nn.Module:
    """Changes BatchNorms to one multiply-add per feature each, in place.

    ONNX does not know this library's operators; onnxruntime would fold the constants of a
    BatchNorm to the same two.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, powernorm.BatchNorm):
            scale, shift = module.affine()
            affine = FeatureAffine(len(scale))
            with torch.no_grad():
                affine.weight.copy_(scale)
                affine.bias.copy_(shift)
            model.set_submodule(name, affine)
    return model
