"""A model after surgery leaves torch as it did before: by every exporter, for other sizes too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import powernorm
from powernorm.errors import InputError
from powernorm.integrations.onnx import export
from powernorm.norms.masks import innermost_scope
from refusals import refuses

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

# torch's own: its exporters to ONNX, and what dynamo meets in the hooks of a module.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

FEATURES, WIDTH = 6, 8
EXAMPLE: Final = (3, 9)
OTHERS: Final = ((4, 12), (FEATURES, 7))
"""Batch and length; a batch as large as the number of features is like any other."""


class Attention(nn.Module):
    """One head. Of torch's own layer TorchScript's exporter keeps the example's length."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor | None) -> Tensor:
        scores = self.query(x) @ self.key(memory).transpose(1, 2)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None], -torch.inf)
        return scores.softmax(-1) @ self.value(memory)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.norm(self.wide(x.transpose(1, 2)))).transpose(1, 2)


class Encoder(nn.Module):
    """A layer of a Conformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, WIDTH)
        self.attention = Attention()
        self.convolution = Convolution()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.up(src)
        y = self.norms[0](x)
        x = x + self.attention(y, y, src_key_padding_mask)
        return x + self.convolution(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Encoder()
        self.norm = nn.LayerNorm(WIDTH)
        self.cross = Attention()

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_key_padding_mask: Tensor,
        memory_key_padding_mask: Tensor,
    ) -> Tensor:
        x = self.own(tgt, tgt_key_padding_mask)
        return x + self.cross(self.norm(x), memory, memory_key_padding_mask)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class WithLengths(Plain):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        return self.head(self.encoder(x, padding))


class WithMask(Plain):
    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        return self.head(self.encoder(x, padding_mask))


class EncoderDecoder(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_key_padding_mask: Tensor,
        tgt_key_padding_mask: Tensor,
    ) -> Tensor:
        memory = self.encoder(src, src_key_padding_mask)
        masks = tgt_key_padding_mask, src_key_padding_mask
        return self.head(self.decoder(tgt, memory, *masks))


MODELS: Final = (Plain, WithLengths, WithMask, EncoderDecoder)
SIZES: Final[dict[type[nn.Module], dict[str, tuple[str, ...]]]] = {
    Plain: {"x": ("batch", "length")},
    WithLengths: {"x": ("batch", "length"), "lengths": ("batch",)},
    WithMask: {"x": ("batch", "length"), "padding_mask": ("batch", "length")},
    EncoderDecoder: {
        "src": ("batch", "length"),
        "tgt": ("batch", "target"),
        "src_key_padding_mask": ("batch", "length"),
        "tgt_key_padding_mask": ("batch", "target"),
    },
}
"""Names of the sizes that vary, by the arguments."""


def padded(batch: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors that are loud at padding, lengths, mask."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, length + 1, (batch,), generator=draw)
    lengths[0] = length
    padding = torch.arange(length) >= lengths[:, None]
    x = torch.randn(batch, length, FEATURES, generator=draw)
    return x.masked_fill(padding.unsqueeze(-1), 50.0), lengths, padding


def inputs(model: type[nn.Module], batch: int, length: int) -> tuple[Tensor, ...]:
    x, lengths, padding = padded(batch, length, 0)
    if model is EncoderDecoder:
        y, _, target_padding = padded(batch, length + 1, 1)
        return x, y, padding, target_padding
    given = {Plain: (), WithLengths: (lengths,), WithMask: (padding,)}
    return x, *given[model]


def built(model: type[nn.Module], surgery: str) -> nn.Module:
    """A model in evaluation, with statistics that are not those of the start."""
    torch.manual_seed(0)
    made = model().train()
    with torch.no_grad():
        made(*inputs(model, *EXAMPLE))  # for the model's own BatchNorms
    made.eval()
    if surgery == "masked":
        powernorm.mask_batch_norms(made)
    else:
        powernorm.swap(made, "bn")
    if surgery in ("calibrated", "folded"):
        powernorm.calibrate(made, [inputs(model, *EXAMPLE), inputs(model, *OTHERS[0])])
    if surgery == "folded":
        powernorm.fold(made, inputs(model, *EXAMPLE))
    return made.eval()


def dims(model: type[nn.Module]) -> dict[str, dict[int, Any]]:
    known = {name: torch.export.Dim(name) for name in ("batch", "length", "target")}
    return {
        name: {dim: known[size] for dim, size in enumerate(sizes)}
        for name, sizes in SIZES[model].items()
    }


Run = Callable[..., Tensor]


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    example = inputs(type(model), *EXAMPLE)
    return torch.export.export(model, example, dynamic_shapes=dims(type(model)))


def by_torch_export(model: nn.Module, folder: Path) -> Run:
    del folder
    return exported(model).module()


def by_onnx(model: nn.Module, folder: Path) -> Run:
    example = inputs(type(model), *EXAMPLE)
    program = export(model, example, dynamic_shapes=dims(type(model)))
    program.save(folder / "model.onnx")
    return in_onnxruntime(folder / "model.onnx")


def by_torchscript_to_onnx(model: nn.Module, folder: Path) -> Run:
    sizes = SIZES[type(model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        torch.onnx.export(
            model,
            inputs(type(model), *EXAMPLE),
            folder / "model.onnx",
            dynamo=False,
            input_names=list(sizes),
            dynamic_axes={name: dict(enumerate(names)) for name, names in sizes.items()},
        )
    return in_onnxruntime(folder / "model.onnx")


def in_onnxruntime(path: Path) -> Run:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*tensors: Tensor) -> Tensor:
        feed = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


def by_aotinductor(model: nn.Module, folder: Path) -> Run:
    path = torch._inductor.aoti_compile_and_package(
        exported(model), package_path=str(folder / "model.pt2")
    )
    return torch._inductor.aoti_load_package(path)


def by_inductor(model: nn.Module, folder: Path) -> Run:
    del folder
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    with torch.no_grad():
        compiled(*inputs(type(model), *EXAMPLE))

    def run(*tensors: Tensor) -> Tensor:
        with torch._dynamo.config.patch(error_on_recompile=True):
            return compiled(*tensors)

    return run


def check(model: type[nn.Module], surgery: str, by: Callable[..., Run], folder: Path) -> None:
    made = built(model, surgery)
    run = by(made, folder)
    with torch.no_grad():
        for batch, length in OTHERS:
            first, *others = inputs(model, batch, length)
            y = run(first, *others)
            torch.testing.assert_close(y, made(first, *others), rtol=1e-4, atol=1e-5)
            if surgery == "masked" and model in (WithLengths, WithMask):
                padding = padded(batch, length, 0)[2]
                quiet = run(first.masked_fill(padding.unsqueeze(-1), 0.0), *others)
                torch.testing.assert_close(quiet[~padding], y[~padding], rtol=1e-4, atol=1e-5)


SURGERIES: Final = ("swapped", "masked", "calibrated", "folded")


@pytest.mark.thinned(1)
@pytest.mark.parametrize("by", [by_torch_export, by_onnx, by_torchscript_to_onnx])
@pytest.mark.parametrize("surgery", SURGERIES)
@pytest.mark.parametrize("model", MODELS)
def test_exports(
    model: type[nn.Module], surgery: str, by: Callable[..., Run], tmp_path: Path
) -> None:
    check(model, surgery, by, tmp_path)


@pytest.mark.slow
@pytest.mark.thinned(1)
@pytest.mark.parametrize("by", [by_aotinductor, by_inductor])
@pytest.mark.parametrize("surgery", SURGERIES)
@pytest.mark.parametrize("model", MODELS)
def test_compilers(
    model: type[nn.Module], surgery: str, by: Callable[..., Run], tmp_path: Path
) -> None:
    check(model, surgery, by, tmp_path)


class LengthFirst(nn.Module):
    """Takes (length, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = Convolution()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        del lengths
        return self.convolution(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("size", [(9, 3), (5, 5)])
@pytest.mark.parametrize("free", ["auto", "named"])
def test_the_batch_is_found_where_the_length_is_first(size: tuple[int, int], free: str) -> None:
    model = LengthFirst().eval()
    powernorm.mask_batch_norms(model)
    lengths = torch.tensor([5, 4, 3, 5, 2])
    other = torch.randn(7, 4, WIDTH), torch.tensor([7, 2, 5, 3])
    with torch.no_grad():
        wanted = model(*other)  # shows the order of dimensions
    batch, length, auto = (
        torch.export.Dim("batch"),
        torch.export.Dim("length"),
        torch.export.Dim.AUTO,
    )
    shapes = {
        "auto": {"x": {0: auto, 1: auto}, "lengths": {0: auto}},
        "named": {"x": {0: length, 1: batch}, "lengths": {0: batch}},
    }
    example = torch.randn(*size, WIDTH), lengths[: size[1]]
    program = torch.export.export(model, example, dynamic_shapes=shapes[free])
    torch.testing.assert_close(program.module()(*other), wanted)


def test_a_mask_of_an_unknown_direction_has_to_be_seen_before() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = Convolution()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            del mask
            return self.convolution(x)

    def example(batch: int, length: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, length, WIDTH), padded(batch, length, 0)[2]

    model = Either().eval()
    powernorm.mask_batch_norms(model)
    shapes = {"x": dims(WithMask)["x"], "mask": dims(WithMask)["padding_mask"]}
    with pytest.raises(
        InputError, match=r"mask of Either may mark padding or valid positions, .* or an export"
    ):
        torch.export.export(model, example(*EXAMPLE), dynamic_shapes=shapes)
    assert innermost_scope() is None  # a failed export leaves no mask to norms of other models
    other = example(*OTHERS[0])
    with torch.no_grad():
        wanted = model(*other)
    program = torch.export.export(model, example(*EXAMPLE), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(*other), wanted)


def test_errors_quote_torchs_constraints_and_print_no_graph(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Fixed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.zeros(EXAMPLE[1], 1)

    class Reading(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.max() > 0 else x

    example, shapes = inputs(Plain, *EXAMPLE), dims(Plain)
    with pytest.raises(InputError) as caught:
        export(Fixed().eval(), example, dynamic_shapes=shapes)
    assert "marked length as dynamic but your code specialized it" in str(caught.value)
    assert str(caught.value).endswith("Suggested fixes:\n  length = 9")
    with pytest.raises(InputError, match=r"cannot trace Reading .* data-dependent"):
        export(Reading().eval(), example, dynamic_shapes=shapes)
    seen = Reading().train()
    seen(*example)
    refuses(r"Reading cannot be planned: .* data-dependent", powernorm.fold, seen.eval(), example)
    assert capfd.readouterr().err == ""
