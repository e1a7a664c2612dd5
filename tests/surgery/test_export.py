"""Folded models leave torch: no norm in the modules, in torch.export's graph, in ONNX."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.lab.models.choices import TransformerShape
from powernorm.lab.models.language_model import LanguageModel
from powernorm.norms import Norm
from powernorm.surgery import FoldReport
from surgery import foreign_models
from surgery.foreign_models import FAMILIES, Inputs

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

# The exporter of torch 2.13 and torch itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)

NORMS = (
    Norm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)


def post_norm_language_model() -> tuple[nn.Module, Inputs]:
    def build() -> nn.Module:
        return LanguageModel(
            foreign_models.VOCABULARY,
            lambda features: powernorm.build_norm("ln", features),
            TransformerShape(
                num_features=8,
                num_layers=2,
                num_heads=2,
                feedforward_features=16,
                placement="post",
            ),
            max_length=32,
        )

    return foreign_models.seeded(build), {"tokens": foreign_models.plain_tokens()}


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    **{
        name: FAMILIES[name]
        for name in (
            "language-model", "torch-encoder", "torch-encoder-pre", "bert", "gpt2", "llama",
            "vit", "timm-vit",
        )
    },
    "language-model-post": post_norm_language_model,
}  # fmt: skip
MULTIPLY_ADDS = {"torch-encoder": {"norm"}, "torch-encoder-pre": {"norm"}}
"""Where an output of the model and its input fix the values on both sides."""


class Plain(nn.Module):
    """Positional tensors in, one tensor out: what onnxruntime deals in."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        return foreign_models.run(self.model, dict(zip(self.names, tensors, strict=True)))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The exporter logs what it cannot register of other libraries, and they warn."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def folded(model: nn.Module, inputs: Inputs) -> FoldReport:
    powernorm.swap(model, to="bn", where="*")
    powernorm.calibrate(model, [inputs, other(inputs)])
    return powernorm.fold(model, inputs)


def other(inputs: Inputs) -> Inputs:
    """Other values of the same shapes."""
    draw = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(value.shape, generator=draw)
        if value.is_floating_point()
        else torch.randint(5, foreign_models.VOCABULARY, value.shape, generator=draw)
        for name, value in inputs.items()
    }


def exported(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    plain = Plain(model, tuple(inputs)).eval()
    with torch.no_grad():
        return torch.export.export(plain, tuple(inputs.values()))


def to_onnx(program: torch.export.ExportedProgram) -> Any:
    found = torch.onnx.export(program, dynamo=True, verbose=False)
    assert found is not None
    return found.model_proto


def runtime_output(proto: Any, inputs: Inputs) -> Tensor:
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [given.name for given in session.get_inputs()]
    feed = {name: t.numpy() for name, t in zip(names, inputs.values(), strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


def operators(proto: Any) -> Counter[str]:
    """Of the graph, of graphs inside its nodes and of its functions."""
    found: Counter[str] = Counter()
    queue = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while queue:
        node = queue.pop()
        found[node.op_type] += 1
        for attribute in node.attribute:
            queue += [*attribute.g.node, *(n for graph in attribute.graphs for n in graph.node)]
    return found


def of_norms(found: Counter[str]) -> set[str]:
    """Operators that normalize, whole or taken apart. Softmax is an operator of its own."""
    parts = {"Sqrt", "Rsqrt", "Reciprocal", "Div"}
    return {
        name
        for name in found
        if name in parts or name.startswith("Reduce") or "Normalization" in name
    }


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", some_default(MODELS, "gpt2", "llama", "torch-encoder-pre"))
def test_folded_models_are_exported_without_norms(name: str) -> None:
    original, inputs = MODELS[name]()
    before = operators(to_onnx(exported(original, inputs)))
    assert of_norms(before), "the check sees no norm in the original"

    report = folded(original, inputs)
    model = report.model
    left = {row.name for row in report.rows if row.action != "fold"}
    assert left == MULTIPLY_ADDS.get(name, set())
    assert not [part for part in model.modules() if isinstance(part, NORMS)]

    program = exported(model, inputs)
    proto = to_onnx(program)
    after = operators(proto)
    assert not of_norms(after)
    # Nor has a norm become arithmetic: new are biases that folding made and multiply-adds.
    beyond = after - before
    assert beyond["Mul"] <= len(left)
    assert beyond["Add"] <= len(left) + len(report.structure.biases)
    assert not beyond.keys() - {"Mul", "Add"}, beyond

    for given in (inputs, other(inputs)):
        with torch.no_grad():
            wanted = foreign_models.run(model, given)
            same(program.module()(*given.values()), wanted)
        same(runtime_output(proto, given), wanted)


@pytest.mark.parametrize("name", ["bert", "gpt2", "torch-encoder-pre", "language-model"])
def test_folded_models_pass_torch_export_as_they_are_called(name: str) -> None:
    model, inputs = MODELS[name]()
    folded(model, inputs)
    if name == "gpt2":
        # torch.export does not know transformers' cache as an output, folded or not.
        inputs["use_cache"] = False
    with torch.no_grad():
        program = torch.export.export(model, (), inputs)
        same(
            foreign_models.output_of(program.module()(**inputs)), foreign_models.run(model, inputs)
        )


class HandWritten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("norm", "operators_of_it"),
    [
        (nn.BatchNorm1d(4), {"BatchNormalization"}),
        (nn.GroupNorm(2, 4), {"InstanceNormalization"}),
        (nn.RMSNorm(3), {"ReduceMean", "Sqrt", "Reciprocal"}),
        (HandWritten(), {"ReduceMean", "Sqrt", "Div"}),
    ],
    ids=["BatchNorm1d", "GroupNorm", "RMSNorm", "hand-written"],
)
def test_the_check_sees_other_norms(norm: nn.Module, operators_of_it: set[str]) -> None:
    model = nn.Sequential(nn.ReLU(), norm, nn.ReLU()).eval()
    proto = to_onnx(torch.export.export(model, (torch.randn(2, 4, 3),)))
    assert of_norms(operators(proto)) >= operators_of_it


def test_softmax_is_no_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)).eval()
    proto = to_onnx(torch.export.export(model, (torch.randn(2, 3),)))
    assert not of_norms(operators(proto))
