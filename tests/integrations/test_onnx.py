"""A user's model as ONNX: right to rounding, or one sentence with a fix."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.errors import InputError
from powernorm.integrations.onnx import export, largest_error
from powernorm.norms import NORMS, Norm
from refusals import refuses
from surgery.foreign_models import FAMILIES, tokens
from surgery.static_models import static_family

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

# The exporter of torch 2.13 and torch itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)


class Scored(nn.Module):
    """Two outputs, keyword arguments."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(x + shift)
        return {"logits": self.head(hidden), "hidden": hidden}


def trained(norm: Norm) -> Norm:
    """The norm with statistics, γ and β that are not 0 and 1."""
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return norm


def inputs(rows: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4), "shift": torch.randn(4)}


def test_a_folded_model(tmp_path: Path) -> None:
    model = Scored(powernorm.BatchNorm(8)).eval()
    powernorm.calibrate(model, [inputs(50), inputs(60)])
    powernorm.fold(model, inputs())
    batch = torch.export.Dim("batch", min=2)
    program = export(model, inputs(), dynamic_shapes={"x": {0: batch}, "shift": None})
    assert largest_error(program, model, inputs()) < 1e-5
    assert largest_error(program, model, inputs(7)) < 1e-5
    with torch.no_grad():
        model.head.bias[0] += 1.0  # another model than was exported
    assert largest_error(program, model, inputs()) > 1e-2
    # No norm is left in the graph, whole or taken apart.
    assert {node.op_type for node in program.model_proto.graph.node} <= {"Add", "Gemm", "Relu"}
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [given.name for given in session.get_inputs()] == ["x", "shift"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", some_default(["gpt2", "bert", "vit", "llama", "torch-encoder"], "gpt2")
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_folded_model_of_another_library(name: str) -> None:
    """Besides the softmax of attention the graph has no root and no reduction."""
    model, example = static_family(name)
    powernorm.fold(model, example)
    if hasattr(model, "config"):
        example |= {"use_cache": False} if name in ("gpt2", "llama") else {}
    program = export(model, example)
    found = {node.op_type for node in program.model_proto.graph.node}
    assert not {one for one in found if "Normalization" in one or one.startswith("Reduce")}
    assert not found & {"Sqrt", "Rsqrt", "Reciprocal"}


def test_sizes_that_vary_have_the_names_that_are_asked_for(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, x + y], dim=1)

    example = {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}
    names = {"x": {0: "batch", 1: "length"}, "y": {0: "rows", 1: "length"}}
    program = export(Sum().eval(), example, dynamic_shapes=names)
    assert largest_error(program, Sum(), {"x": torch.randn(2, 7), "y": torch.randn(2, 7)}) < 1e-6
    program.save(tmp_path / "sum.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "sum.onnx")
    assert [given.shape for given in session.get_inputs()] == [["batch", "length"]] * 2


def test_a_language_model_is_written_without_its_cache() -> None:
    model = FAMILIES["llama"]()[0].eval()
    ids = tokens()
    assert model.config.use_cache
    assert model(ids).past_key_values is not None
    program = export(model, {"input_ids": ids})
    assert largest_error(program, model, {"input_ids": ids}) < 1e-5
    assert model.config.use_cache


class Each(nn.Module):
    """Every norm, each with an output of its own: `largest_error` is relative to each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(trained(powernorm.build_norm(name, 8)) for name in NORMS)

    def forward(self, x: Tensor, shift: Tensor) -> list[Tensor]:
        return [norm(x.repeat(1, 2) + shift.repeat(2)) for norm in self.norms]


def test_a_model_whose_norms_are_left() -> None:
    model = Each().eval()
    batch = torch.export.Dim("batch", min=2)
    program = export(model, inputs(), dynamic_shapes={"x": {0: batch}, "shift": None})
    assert largest_error(program, model, inputs(7)) < 1e-5
    assert {node.domain for node in program.model.graph} == {""}  # ONNX's own operators


def test_norms_in_training_mode_are_named() -> None:
    model = Scored(powernorm.PowerNorm(8)).eval()
    model.inner[1].train()
    refuses(r"norms inner\.1 are in training mode, .*model\.eval", export, model, inputs())
    model = nn.Sequential(*(powernorm.BatchNorm(4) for _ in range(5)))
    model.training = False
    refuses(r"norms 0, 1, 2 and 2 more are in training mode", export, model, torch.randn(3, 4))


def test_models_that_cannot_be_exported() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    refuses("Sequential is in training mode", export, model, torch.randn(2, 4))
    with pytest.raises(InputError, match="cannot trace Sequential on the example inputs"):
        export(model.eval(), torch.randn(2, 5))
